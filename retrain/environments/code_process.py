"""Runs code of a model for the tool `python`, and ends all that it has started, in whatever session that is.

A script: `python code_process.py SECONDS CODE`. Needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

LATE = 3
"""Exit code where the code took more than its seconds. 0 is the end of all that it started, any other is not."""

_PROCESSES, _FILE = 64, 1 << 24
"""Limits of the code: processes, and bytes of a file."""

_PATIENCE_S = 30.0
"""For the end of what is killed."""

_PR_SET_CHILD_SUBREAPER = 36


def main(seconds: float, code: str) -> int:
    """Run the code; its children without a parent become this process's, which ends them."""
    resource.setrlimit(resource.RLIMIT_NPROC, (_PROCESSES, _PROCESSES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if not child:
        os.setsid()
        os.execv(sys.executable, [sys.executable, "-I", "-c", code])  # noqa: S606 - what the sandbox is for
    late = not select.select([os.pidfd_open(child)], [], [], seconds)[0]
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    patience = time.monotonic() + _PATIENCE_S
    while time.monotonic() < patience:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return LATE if late else 0
        if not ended:
            _kill_children()
            time.sleep(0.001)
    return 1


def _kill_children() -> None:
    with suppress(OSError):  # /proc is empty where the machine hides parts of its own
        for one in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(one), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2]))
