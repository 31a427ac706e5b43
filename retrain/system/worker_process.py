"""A process that answers numbered calls over one pipe, and that can be killed with all it has started.

`WorkerPool` has the parent's side of the protocol, `serve` the worker's. A worker with threads answers the calls that
it is busy with in any order.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from retrain.system import sandbox
from retrain.system.process import end, follower

_PR_SET_DUMPABLE = 4
_ALLOWED = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ALLOWED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "CUDA_")


class Containment(NamedTuple):
    """Restrictions of a worker.

    Attributes:
        memory_mb: what each of its processes may allocate; 0 for no limit.
        sandboxed: it runs in a `sandbox`.
        readable: what it can still read where the sandbox hides files, besides its modules.
        runs_code: it may run code of the model (see `model_code`).
    """

    memory_mb: int
    sandboxed: bool
    readable: tuple[str, ...] = ()
    runs_code: bool = False


@dataclass(frozen=True)
class WorkerSpec:
    """Start settings of one kind of workers, and the time limit of their calls.

    Attributes:
        what: named in errors, such as "a reward".
        module: run as `python -m module`; it calls `serve`.
        hello: the first call: what the worker needs to get ready.
        containment: what it is kept from.
        seconds: deadline of every other call.
        variables: names of environment variables that it sees besides the usual ones.
        python: another interpreter, which sees this package's modules and otherwise its own alone.
        at_once: calls that the worker does at the same time, each in a thread.
        hint: appended to the error of a worker that cannot load what it needs.
    """

    what: str
    module: str
    hello: Any
    containment: Containment
    seconds: float
    variables: Sequence[str] = ()
    python: str | None = None
    at_once: int = 1
    hint: str = ""


class WorkerProcess:
    """A worker with the parent's end of its pipe. It ends with the process that made it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.pipe, theirs = socket.socketpair()
        command = [*_command(spec.module, spec.python), str(theirs.fileno()), str(spec.at_once)]
        # A new session: `end` kills the whole group, and Ctrl-C reaches the parent alone.
        seen = _environment(set(spec.variables), own_path=spec.python is None)
        options: dict[str, Any] = {"env": seen, "start_new_session": True}
        options |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        with theirs:
            self.process = subprocess.Popen[bytes](command, pass_fds=[theirs.fileno()], **options)

    def kill(self) -> None:
        """End it and whatever it started."""
        end(self.process)
        self.pipe.close()

    def has_closed_pipe(self) -> bool:
        """Return whether it can take no more calls. The pipe must not block."""
        try:
            return self.pipe.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def how_it_ended(self) -> str:
        """Return its exit code or signal in words."""
        if (code := self.process.poll()) is None:
            return "it closed its pipe"
        # A sandboxed worker's signal comes as 128 + its number, as from a shell.
        number = -code if code < 0 else code - 128
        known = number in {one.value for one in signal.Signals}
        return f"killed by {signal.Signals(number).name}" if known else f"exit code {code}"


def start_worker(spec: WorkerSpec) -> Future[WorkerProcess]:
    """Start a worker, in a thread that lives as long as this process."""
    return _starter(os.getpid()).submit(WorkerProcess, spec)


def serve(start: Callable[[Any], tuple[Any, Callable[[Any], Any] | None]]) -> None:
    """In the worker: answer calls until the parent closes the pipe.

    Args:
        start: of the first call makes its answer, and the function that answers all others, None to end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    follower(os.getppid(), signal.SIGKILL)()
    pipe = socket.socket(fileno=int(sys.argv[1]))
    pipe.set_inheritable(False)  # programs that the answering code starts have nothing to say
    calls = pipe.makefile("rb")
    containment, hello = pickle.load(calls)  # noqa: S301 - from the parent
    _contain(Containment(*containment))
    send = _sender(pipe)
    answer, function = start(hello)
    send(0, answer)
    if function is None:
        return
    do = _answering(function, send)
    for number in itertools.count(1):
        try:
            call = pickle.load(calls)  # noqa: S301 - from the parent
        except EOFError:
            return
        do(number, call)


def _sender(pipe: socket.socket) -> Callable[[int, Any], None]:
    """Sends the answer to a numbered call."""
    itself, turn = os.getpid(), threading.Lock()

    def send(number: int, answer: Any) -> None:
        if os.getpid() != itself:
            os._exit(0)  # a copy of the worker that the answering code made: the original answers
        line = json.dumps([number, answer]).encode() + b"\n"
        with turn:
            pipe.sendall(line)

    return send


def _answering(function: Callable[[Any], Any], send: Callable[[int, Any], None]) -> Callable[[int, Any], Any]:
    """Answers a numbered call by the function: right here, or in one of the worker's threads."""
    if (at_once := int(sys.argv[2])) == 1:
        return lambda number, call: send(number, function(call))

    def do(number: int, call: Any) -> None:
        try:
            send(number, function(call))
        except BaseException:
            os._exit(1)  # An exception in a thread would be lost.

    return partial(ThreadPoolExecutor(at_once).submit, do)


def limit(kind: int, value: int) -> None:
    """Lower a limit of this process, as far as the system allows."""
    hard = resource.getrlimit(kind)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _contain(containment: Containment) -> None:
    limit(resource.RLIMIT_CORE, 0)
    if containment.runs_code:
        from retrain.system.model_code import start_outer_launcher  # of no use to the workers of rewards

        start_outer_launcher(containment.memory_mb)
    if containment.sandboxed:
        readable = [*containment.readable, *filter(None, sys.path), sys.prefix, sys.base_prefix]
        sandbox.enter(readable, partial(_before_dropping, containment))
        # No other process may look into its memory, which holds reference answers.
        sandbox.call("prctl", _PR_SET_DUMPABLE, 0, 0, 0, 0)
    if containment.memory_mb:
        limit(resource.RLIMIT_DATA, containment.memory_mb << 20)
        # Memory shared between processes is not counted there. Libraries are not either, as it should be.
        limit(resource.RLIMIT_AS, (containment.memory_mb << 20) + sandbox.LIBRARIES)


def _before_dropping(containment: Containment) -> None:
    """Run the steps that need privileges which a sandboxed process gives up."""
    if containment.runs_code:
        from retrain.system.model_code import start_launcher  # of no use to the workers of rewards

        start_launcher(containment.memory_mb)


def _command(module: str, python: str | None) -> list[str]:
    """Source that runs a module of this package. Another interpreter must not find packages installed with it."""
    if python is None:
        return [sys.executable, "-P", "-m", module]
    package = str(Path(__file__).parents[1])
    alone = (
        "import importlib.util as u, runpy, sys; "
        f"s = u.spec_from_file_location('retrain', {package + '/__init__.py'!r}, "
        f"submodule_search_locations=[{package!r}]); "
        "sys.modules['retrain'] = m = u.module_from_spec(s); s.loader.exec_module(m); "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [python, "-P", "-c", alone]


def _environment(variables: set[str], own_path: bool) -> dict[str, str]:
    """The parent's variables that say nothing private, and those that were asked for."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in variables or name in _ALLOWED or name.startswith(_ALLOWED_PREFIXES)
    }
    # One thread each; a stable hash; and the parent's own sys.path, however it came by it.
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path) if own_path else ""
    return environment


@cache
def _starter(pid: int) -> ThreadPoolExecutor:
    """The thread of this process that starts workers. The kernel ends a worker with the thread that started it,
    and the threads that ask for answers come and go."""
    return ThreadPoolExecutor(1, f"workers of {pid}")
