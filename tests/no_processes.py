"""Plug-in for pytest, for `make quick`: skip every test that starts a process or opens a socket, as soon as it tries.

Nothing is marked by hand: Python's audit events tell. A test that catches the exception is skipped all the same.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

BARRED = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "socket.bind", "socket.connect", "subprocess.Popen"}
_running: list[str] = []
"""The test that runs."""
_tried: dict[str, str] = {}
"""What a test tried, by its node id."""


def _refuse(event: str, _arguments: tuple[Any, ...]) -> None:
    if event in BARRED and _running:
        _tried.setdefault(_running[-1], f"{event}: only `make test` runs tests that start processes or open sockets")
        raise pytest.skip.Exception(_tried[_running[-1]])


sys.addaudithook(_refuse)


def pytest_runtest_logstart(nodeid: str) -> None:
    _running[:] = [nodeid]


def pytest_runtest_logfinish() -> None:
    _running.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report: pytest.TestReport = yield
    if item.nodeid in _tried and report.when == "teardown":
        report.outcome = "passed"  # of a test that was skipped half-way
    elif item.nodeid in _tried:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, _tried[item.nodeid])
    return report
