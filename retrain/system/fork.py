"""Start a Python program as a fork of a server that has already imported its modules, which saves seconds.

The server is the fork server of multiprocessing. It imports no code of users, has one thread, and ends with the process
that uses it. A fork gets arguments, environment variables and a log file, as any process does; forks share no state.
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
from types import ModuleType

_SERVER = multiprocessing.get_context("forkserver")


def prepare(modules: Sequence[str]) -> None:
    """Set the modules that the server imports. The first fork starts the server and waits for the imports.

    Importing them must not start a thread or initialize a GPU, because neither survives a fork.
    """
    _SERVER.set_forkserver_preload(list(modules))


class Fork:
    """`python -m MODULE ARGUMENT...` as a fork. It leads its own session and ends with its parent.

    It does not import the main script of its parent, so a script needs no `if __name__ == "__main__"`.

    Args:
        module: the module to run.
        arguments: command-line arguments.
        log: file to which its output is appended.
        environment: environment variables to add to those of the parent.
        code: exit code of the fork if its parent has ended before the program starts.

    Attributes:
        pid: PID of the fork, which is also its session ID and process group ID.

    Raises:
        OSError, EOFError: the server has ended, because an import raised an error other than ImportError.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], log: Path, environment: Mapping[str, str], code: int
    ) -> None:
        ready, started = _SERVER.Pipe(duplex=False)
        program = (module, arguments, log.absolute(), {**os.environ, **environment}, code, started)
        self._process = _SERVER.Process(target=_run, args=program)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # multiprocessing sends its path
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
            started.close()
        with suppress(EOFError):
            ready.recv()  # from now on the fork leads a process group that signals reach
        ready.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0)
        return self._process.exitcode

    def terminate(self) -> None:
        """Send SIGTERM unless the process has ended."""
        self._process.terminate()


def _run(
    module: str, arguments: Sequence[str], log: Path, environment: dict[str, str], code: int, started: Connection
) -> None:
    os.setsid()
    parent = multiprocessing.parent_process()
    assert parent is not None
    if sys.platform == "linux":  # the kernel sends SIGTERM when the parent's end of the pipe closes
        fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGTERM)
        fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, fcntl.fcntl(parent.sentinel, fcntl.F_GETFL) | os.O_ASYNC)
    if not parent.is_alive():  # it ended before the signal was set up
        os._exit(code)
    with log.open("ab") as file, open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    started.send(None)
    started.close()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
