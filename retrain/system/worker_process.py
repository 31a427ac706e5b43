"""Worker process that answers numbered calls over a socket pair, and that can be killed with all of its children.

`WorkerPool` implements the parent's side of the protocol, `serve` the worker's side. A worker with several threads may
answer its current calls in any order.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

from retrain.system.process import adopt_orphans, descendants, end, follower

_MAX_LOG = 1_000_000
_LIBRARIES = 8 << 30
"""Bytes of address space for mapped files, beside the memory limit. Importing a CUDA build of torch takes 3 GB."""
_ALLOWED_VARIABLES = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ALLOWED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "CUDA_")


@dataclass(frozen=True)
class WorkerSpec:
    """Settings to start workers of one kind, and the time limit of their calls.

    Attributes:
        what: name of the worker's task for errors, such as "a reward".
        module: run as `python -m module`; it calls `serve`.
        hello: body of the first call, with the data that the worker needs to get ready.
        memory_mb: memory limit of each of its processes; 0 for no limit.
        seconds: time limit of every later call.
        variables: names of environment variables that the worker gets in addition to the default ones.
        python: path of another interpreter, which imports this package and otherwise only its own packages; None uses
            this interpreter.
        at_once: number of calls that the worker handles concurrently, each in a thread.
        log: file to which the worker appends what it prints; "" discards it. The file has at most 1 MB.
    """

    what: str
    module: str
    hello: Any
    memory_mb: int
    seconds: float
    variables: Sequence[str] = ()
    python: str | None = None
    at_once: int = 1
    log: str = ""


class WorkerProcess:
    """Worker with the parent's end of its pipe. It ends when the process that started it ends."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.pipe, worker_end = socket.socketpair()
        command = [*_command(spec.module, spec.python), str(worker_end.fileno()), str(spec.at_once)]
        # In a new session, so that `end` kills the whole process group and Ctrl-C reaches only the parent.
        environment = _environment(set(spec.variables), own_path=spec.python is None)
        options: dict[str, Any] = {"env": environment, "start_new_session": True}
        with worker_end, open(spec.log or os.devnull, "a+b") as printed:
            options |= {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": printed}
            self.process = subprocess.Popen[bytes](command, pass_fds=[worker_end.fileno()], **options)

    def kill(self) -> None:
        """Kill the worker and all processes that it has started, and close the pipe."""
        # `end` kills the worker's group, which its descendants in a session of their own have left.
        # Before the kill: afterwards orphans have another parent, and nobody could find them.
        left = descendants(self.process.pid)
        end(self.process)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.pipe.close()

    def has_closed_pipe(self) -> bool:
        """Return whether the worker has closed its end of the pipe. The pipe must be in non-blocking mode."""
        try:
            return self.pipe.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def how_it_ended(self) -> str:
        """Return the worker's exit code or the name of the signal that killed it, for an error message."""
        if (code := self.process.poll()) is None:
            return "it closed its pipe"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def start_worker(spec: WorkerSpec) -> Future[WorkerProcess]:
    """Start a worker from a thread that lives as long as this process."""
    return _start_thread(os.getpid()).submit(WorkerProcess, spec)


def serve(start: Callable[[Any], tuple[Any, Callable[[Any], Any] | None]]) -> None:
    """Answer calls, in the worker, until the parent closes the pipe.

    Args:
        start: called with the body of the first call. It returns the answer, and the function that computes the
            answers of all later calls; None in its place ends the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    follower(os.getppid(), signal.SIGKILL)()
    adopt_orphans()
    cast(TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)  # a crash loses no line of the log
    pipe = socket.socket(fileno=int(sys.argv[1]))
    pipe.set_inheritable(False)  # programs that the worker starts must not write to the pipe
    calls = pipe.makefile("rb")
    memory_mb, seconds, hello = pickle.load(calls)  # noqa: S301 - from the parent
    _limit_memory(memory_mb)
    send = _sender(pipe)
    answer, function = start(hello)
    send(0, answer)
    if function is None:
        return
    handle = _call_handler(function, send)
    for number in itertools.count(1):
        try:
            call = pickle.load(calls)  # noqa: S301 - from the parent
        except EOFError:
            return
        # The limit of CPU time ends the worker even if its parent is not able to kill it.
        limit(resource.RLIMIT_CPU, int(time.process_time() + 2 * seconds) + 10)
        handle(number, call)


def _sender(pipe: socket.socket) -> Callable[[int, Any], None]:
    """Return a function that sends the answer to a numbered call."""
    worker, lock = os.getpid(), threading.Lock()

    def send(number: int, answer: Any) -> None:
        if os.getpid() != worker:
            os._exit(0)  # the code of the user has forked the worker; only the original answers
        _shorten_log()
        line = json.dumps([number, answer]).encode() + b"\n"
        with lock:
            pipe.sendall(line)

    return send


def _shorten_log() -> None:
    """Keep the last half of a log that exceeds `_MAX_LOG` bytes."""
    with suppress(OSError):  # the code of the user may have closed its output
        if (size := os.fstat(1).st_size) > _MAX_LOG:
            last = os.pread(1, _MAX_LOG // 2, size - _MAX_LOG // 2)
            os.ftruncate(1, 0)
            os.write(1, last)


def _call_handler(function: Callable[[Any], Any], send: Callable[[int, Any], None]) -> Callable[[int, Any], Any]:
    """Return a function that answers a numbered call, in the main thread or in one of the worker's threads."""
    if (at_once := int(sys.argv[2])) == 1:
        return lambda number, call: send(number, function(call))

    def answer_or_exit(number: int, call: Any) -> None:
        try:
            send(number, function(call))
        except BaseException:
            os._exit(1)  # otherwise the exception would be lost in the thread

    return partial(ThreadPoolExecutor(at_once).submit, answer_or_exit)


def limit(kind: int, value: int) -> None:
    """Lower a resource limit of this process, if the system allows it.

    Args:
        kind: constant of the `resource` module, such as RLIMIT_CORE.
        value: the new soft limit. The hard limit stays.
    """
    hard = resource.getrlimit(kind)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _limit_memory(memory_mb: int) -> None:
    """Limit the memory of this process, and write no core file if it exceeds the limit.

    If the machine has too little memory, the kernel ends this process, and what it starts, before the trainer.
    """
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    limit(resource.RLIMIT_CORE, 0)
    if memory_mb:
        limit(resource.RLIMIT_DATA, memory_mb << 20)
        # RLIMIT_DATA does not count shared memory, which RLIMIT_AS does. RLIMIT_AS also counts libraries.
        limit(resource.RLIMIT_AS, (memory_mb << 20) + _LIBRARIES)


def _command(module: str, python: str | None) -> list[str]:
    """Return the command that runs a module of this package.

    Another interpreter gets only this package, not the packages that are installed next to it.
    """
    if python is None:
        return [sys.executable, "-P", "-m", module]
    package = str(Path(__file__).parents[1])
    source = (
        "import importlib.util as u, runpy, sys; "
        f"s = u.spec_from_file_location('retrain', {package + '/__init__.py'!r}, "
        f"submodule_search_locations=[{package!r}]); "
        "sys.modules['retrain'] = m = u.module_from_spec(s); s.loader.exec_module(m); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [python, "-P", "-c", source]


def _environment(variables: set[str], own_path: bool) -> dict[str, str]:
    """Return the environment variables of a worker: those of the parent that are not private, and requested ones.

    Args:
        variables: names of the requested variables.
        own_path: give the worker the parent's `sys.path`.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in variables or name in _ALLOWED_VARIABLES or name.startswith(_ALLOWED_PREFIXES)
    }
    # One CPU thread per worker, and a fixed hash seed, so that results are reproducible.
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path) if own_path else ""
    return environment


@cache
def _start_thread(pid: int) -> ThreadPoolExecutor:
    """Return an executor whose single thread starts the workers of this process.

    The kernel ends a worker when the thread that started it ends, so a thread that lives longer than its callers does.
    """
    return ThreadPoolExecutor(1, f"workers of {pid}")
