"""A program that starts as a fork of a process in which its imports are done, seconds before it would by itself.

The process is multiprocessing's fork server. It has imported some modules and nothing of a user's, has one thread, and
ends with the process that uses it. What a fork is given is what any process is given: arguments, variables, and a file
for what it prints; of another fork it sees nothing.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

_SERVER = multiprocessing.get_context("forkserver")


def prepare(modules: Sequence[str]) -> None:
    """Name the modules that the server imports; the first fork starts it and waits for them.

    None of them may begin a thread or open a GPU when it is imported: neither survives a fork.
    """
    _SERVER.set_forkserver_preload(list(modules))


class Fork:
    """`python -m MODULE ARGUMENT...` as a fork. It leads a session and ends with the process that made it.

    As with every process of multiprocessing, a fork imports the script of its maker first, so that a script
    must not start one outside `if __name__ == "__main__"`.

    Args:
        module, arguments: the program.
        log: what it prints is appended to this file.
        environment: variables besides those of the process that makes it.
        code: exit code of a fork whose maker has ended before it began.

    Attributes:
        pid: of the fork, and of its session and process group.

    Raises:
        OSError, EOFError: the server has ended: a module that it imports raises another error than ImportError.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], code: int
    ) -> None:
        ready, begun = _SERVER.Pipe(duplex=False)
        program = (module, arguments, log.absolute(), {**os.environ, **environment}, code, begun)
        self._process = _SERVER.Process(target=_run, args=program)
        try:
            self._process.start()
        finally:
            begun.close()
        with suppress(EOFError):
            ready.recv()  # from now on a signal to its group reaches it
        ready.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended after so many seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self._process.terminate()


def _run(
    module: str, arguments: Sequence[str], log: Path, environment: dict[str, str], code: int, begun: Connection
) -> None:
    os.setsid()
    maker = multiprocessing.parent_process()
    assert maker is not None
    if sys.platform == "linux":  # the kernel sends the signal when the maker's end of the pipe is closed
        fcntl.fcntl(maker.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(maker.sentinel, fcntl.F_SETSIG, signal.SIGTERM)
        fcntl.fcntl(maker.sentinel, fcntl.F_SETFL, fcntl.fcntl(maker.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if not maker.is_alive():  # it ended before the kernel was asked
        os._exit(code)
    with log.open("ab") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    begun.send(None)
    begun.close()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
