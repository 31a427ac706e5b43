"""Processes of a test that find torch imported: importing it would take longer than what they do."""

import multiprocessing

from tests.waiting import PATIENCE_S


def forked(function, *arguments):
    """The function in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def finish(process):
    """Wait for a process that ends well."""
    process.join(timeout=PATIENCE_S)
    assert process.exitcode == 0
