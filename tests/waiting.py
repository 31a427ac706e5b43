"""Waiting for what must happen, on a machine however busy: no test may depend on how long anything takes."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 300.0
"""Only a failure takes as long."""


def until(condition: Callable[[], Any], process: subprocess.Popen | None = None) -> Any:
    """Wait until the condition holds, while the process runs; returns what the condition returned."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        late, ended = time.monotonic() > deadline, process is not None and process.poll() is not None
        if found := condition():
            return found
        assert not late, "waited in vain"
        assert not ended, f"it ended too early, with {process.returncode}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def fork_of(pid: int) -> int:
    """The process that does the work of a client of the server of forks (see `tests/forks.py`), or else the process."""
    try:
        return int(Path(os.environ["RETRAIN_TEST_SERVER"], "forks", str(pid)).read_text())
    except (FileNotFoundError, ValueError):  # none, or not written yet
        return pid


def kill(process: subprocess.Popen) -> None:
    """Send SIGKILL to the process that does the work; a client of it ends in the same way, after it."""
    os.kill(fork_of(process.pid), signal.SIGKILL)


def children(pid: int) -> list[int]:
    """The processes that a process, or the fork that does its work, has started."""
    listed = subprocess.run(["ps", "--ppid", str(fork_of(pid)), "-o", "pid="], capture_output=True, text=True).stdout
    return [int(child) for child in listed.split()]


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    found = children(pid)
    return found + [below for child in found for below in descendants(child)]


def ends(process: subprocess.Popen) -> int:
    """The exit code of a process, once it has ended; one that does not is killed, since others wait without a limit."""
    try:
        return process.wait(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
