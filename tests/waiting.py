"""Waiting for what must happen, on a machine however busy: no test may depend on how long anything takes."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 600.0
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


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have."""
    listed = subprocess.run(["ps", "--ppid", str(pid), "-o", "pid="], capture_output=True, text=True).stdout
    children = [int(child) for child in listed.split()]
    return children + [below for child in children for below in descendants(child)]


def ends(process: subprocess.Popen) -> int:
    """The exit code of a process, once it has ended."""
    return process.wait(timeout=PATIENCE_S)
