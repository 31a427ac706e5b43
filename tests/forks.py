"""Processes of a test that find torch imported: importing it would take longer than what they do."""

import gc
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest import mock

from retrain.campaign.work.run_process import _IMPORTED
from retrain.registry.component import REGISTERED
from retrain.system.fork import prepare
from tests.waiting import PATIENCE_S

_RETRAIN = "from retrain.cli.main import main\nmain()"
_SERVER: Any = getattr(forkserver, "_forkserver", None)
"""The one server of a process and, here, of its forks. Where Python hides it, every fork starts its own."""
_VARIABLES = dict(os.environ)


def forked(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function in a process of its own."""
    process: Any = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    return process


def finish(process: Any) -> None:
    """Wait for a process that ends well."""
    process.join(timeout=PATIENCE_S)
    assert process.exitcode == 0


def run_source(source: str, *arguments: Any, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python -c SOURCE ARGUMENT...`, to its end."""
    return _run(source, ["-c", *map(str, arguments)], cwd, path=[""])


def run_command(
    *arguments: Any, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`retrain ARGUMENT...`, to its end; as for the installed command, its folder is not on Python's path."""
    return _run(_RETRAIN, ["retrain", *map(str, arguments)], cwd, environment=environment)


def run_campaign(
    *arguments: Any, cwd: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`run_command`, whose runs are forks of one server for all: what it imports would take seconds each time.

    It starts with the variables that the tests were started with, whichever test is the first to ask for it.
    """
    if hasattr(_SERVER, "_forkserver_pid"):
        prepare(_IMPORTED)
        with mock.patch.dict(os.environ, _VARIABLES, clear=True):
            forkserver.ensure_running()
    return run_command(*arguments, cwd=cwd, environment=environment)


def _run(
    source: str,
    argv: list[str],
    cwd: Path | None,
    path: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    with TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        files = (out.fileno(), err.fileno())
        process = forked(_apart, source, argv, cwd or Path.cwd(), files, path, environment or {})
        process.join(timeout=PATIENCE_S)
        assert process.exitcode is not None, "waited in vain"
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(argv, process.exitcode, out.read(), err.read())


def _apart(
    source: str, argv: list[str], cwd: Path, files: tuple[int, int], path: Sequence[str], environment: Mapping[str, str]
) -> None:
    """In the fork: what a program is given that is started in this folder, with these files for what it prints."""
    gc.freeze()  # what the parent has let go of, such as a group of ranks with its threads, cannot be freed here
    os.dup2(files[0], 1)
    os.dup2(files[1], 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    sys.argv = argv
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:] = [*path, *filter(None, sys.path)]
    for key, one in [*REGISTERED.items()]:
        if one.source != "built-in":  # a program knows no plug-in that its folder and its file do not name
            del REGISTERED[key]
            sys.modules.pop(one.target.__module__, None)
    if getattr(_SERVER, "_forkserver_pid", None) is not None:  # whether it lives can only its parent ask
        _SERVER.ensure_running = resource_tracker.ensure_running
    exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})
