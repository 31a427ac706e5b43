"""A process that answers numbered calls over one pipe, and that can be killed with all it has started.

Calls go to the worker as pickles, from the parent, which is trusted. Answers come back as lines of JSON, because
what runs in the worker is not: `[number of the call, answer]`. A line that is not the answer to the next call ends
the worker; no answer is ever taken for that to another call. A worker with threads answers the calls that it is busy
with in any order.
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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from retrain.errors import ComponentError, UserCodeError
from retrain.system import sandbox
from retrain.system.process import end, follower

_START_TIMEOUT_S = 120.0
_LONGEST_ANSWER = 1 << 20
_PR_SET_DUMPABLE = 4
_ALLOWED = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_ALLOWED_PREFIXES = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "CUDA_")


class Containment(NamedTuple):
    """What a worker is kept from.

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


class WorkerLost(Exception):  # noqa: N818 - not always an error
    """A worker that has ended or must be ended; the message says how or why.

    Attributes:
        answered: its last line was a second answer to a call before the one that it was busy with.
    """

    def __init__(self, text: str, answered: bool = False) -> None:
        self.answered = answered
        super().__init__(text)


class WorkerProcess:
    """The parent's end of a worker. It ends with the process that made it.

    Args:
        module: run as `python -m module`; it calls `serve`.
        hello: the first call: what the worker needs to get ready.
        containment: what it is kept from.
        variables: names of environment variables that it sees besides the usual ones.
        seconds: until a call that the worker does not take is given up.
        python: another interpreter, which sees this package's modules and otherwise its own alone.

    Attributes:
        at_once: calls that the worker is busy with at the same time, each in a thread.
        place: of the call that the last answer came to, among those that had none.
    """

    at_once, place = 1, 0

    def __init__(
        self,
        module: str,
        hello: Any,
        containment: Containment,
        variables: Iterable[str],
        seconds: float,
        python: str | None = None,
    ) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(seconds)
        self._sent, self._open = 0, list[int]()
        self._unread = b""
        command = [*_command(module, python), str(theirs.fileno()), str(self.at_once)]
        # A new session: `end` kills the whole group, and Ctrl-C reaches the parent alone.
        seen = _environment(set(variables), own_path=python is None)
        options: dict[str, Any] = {"env": seen, "start_new_session": True}
        options |= dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        start = partial(subprocess.Popen[bytes], command, pass_fds=[theirs.fileno()], **options)
        self.process = _starter(os.getpid()).submit(start).result()
        theirs.close()
        self.send([(tuple(containment), hello)])

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`: ready when there is something to `receive`."""
        return self._socket.fileno()

    def has_answered(self) -> bool:
        """Whether `receive` would not wait."""
        return bool(wait([self._socket], 0))

    def send(self, calls: Iterable[Any]) -> None:
        """Send calls. `receive` raises if they did not arrive."""
        bodies = [pickle.dumps(call) for call in calls]
        self._open += range(self._sent, self._sent + len(bodies))
        self._sent += len(bodies)
        with suppress(OSError):
            self._socket.sendall(b"".join(bodies))

    def receive(self) -> Iterator[Any]:
        """The answers that have arrived, each to the call at `place`; waits if nothing has arrived.

        What arrived before a line that is no answer is still an answer, so that the right call is blamed for the line.

        Raises:
            WorkerLost: the worker has ended, or sent what is not the answer to a call that it is busy with.
        """
        try:
            arrived = self._socket.recv(1 << 16)
        except OSError:
            arrived = b""
        if not arrived:
            raise WorkerLost(self._how_it_ended())
        *lines, self._unread = (self._unread + arrived).split(b"\n")
        if len(self._unread) > _LONGEST_ANSWER:
            raise WorkerLost("it sent an answer without an end")
        for line in lines:
            yield self._answer(line)

    def kill(self) -> None:
        """End it and whatever it started."""
        end(self.process)
        self._socket.close()

    def _answer(self, line: bytes) -> Any:
        try:
            number, answer = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            raise WorkerLost("it sent what is no answer") from None
        if type(number) is not int or number not in self._open[: self.at_once]:
            again = type(number) is int and 0 < number < self._sent and number not in self._open
            raise WorkerLost("it answered a call twice" if again else "it sent an answer to no call", again)
        self.place = self._open.index(number)
        del self._open[self.place]
        return answer

    def _how_it_ended(self) -> str:
        try:
            code = self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        # A sandboxed worker's signal comes as 128 + its number, as from a shell.
        number = -code if code < 0 else code - 128
        known = number in {one.value for one in signal.Signals}
        return f"killed by {signal.Signals(number).name}" if known else f"exit code {code}"


class TimedWorker(WorkerProcess):
    """A worker whose first call and whose every other call has a deadline.

    Args:
        what: errors say that this could not be loaded.
        module, hello, containment, variables, seconds, python: see `WorkerProcess`; a call may take as many seconds.

    Attributes:
        ready: it has answered the first call.
        pending: calls sent and not answered, in order and as the sender names them; it is busy with the first
            `at_once` of them.
        deadline: when one of these, or the first call, has taken too long; infinite when it has nothing to do.
    """

    def __init__(  # noqa: PLR0913 - those of its base
        self,
        what: str,
        module: str,
        hello: Any,
        containment: Containment,
        variables: Iterable[str],
        seconds: float,
        python: str | None = None,
    ) -> None:
        super().__init__(module, hello, containment, variables, seconds, python)
        self._what, self._seconds = what, seconds
        self.ready = False
        self.pending: deque[Any] = deque()
        self._clocks: list[float] = []
        self.deadline = time.monotonic() + _START_TIMEOUT_S

    def gone(self) -> bool:
        """Whether it has ended, or has something to say though nothing was asked."""
        return self.process.poll() is not None or (self.ready and self.has_answered())

    def give(self, calls: Sequence[tuple[Any, Any]]) -> None:
        """Give it these calls, each with its name; a call's clock runs from when the worker is busy with it."""
        self.pending.extend(name for name, _ in calls)
        self._clocks += [float("inf")] * len(calls)
        self._wind()
        self.send([body for _, body in calls])

    def answered(self) -> Any:
        """The name of the call that an answer has come to; the clock of the next runs from now."""
        name = self.pending[self.place]
        del self.pending[self.place], self._clocks[self.place]
        self._wind()
        return name

    def late(self) -> list[Any]:
        """The names of the calls that have taken too long."""
        now = time.monotonic()
        return [name for name, clock in zip(self.pending, self._clocks, strict=True) if clock <= now]

    def _wind(self) -> None:
        end = time.monotonic() + self._seconds
        self._clocks[: self.at_once] = [min(clock, end) for clock in self._clocks[: self.at_once]]
        self.deadline = min(self._clocks[: self.at_once], default=float("inf"))

    def overdue(self) -> str:
        """What passing its deadline means, in words; UserCodeError if it is not even ready."""
        if not self.ready:
            raise UserCodeError(f"loading {self._what} took longer than {_START_TIMEOUT_S:g} s; look at its imports")
        return f"took longer than {self._seconds:g} s"

    def ended(self, lost: WorkerLost) -> str:
        """What its end means, in words; UserCodeError if it was not even ready."""
        if not self.ready:
            raise UserCodeError(f"{self._what} ended the process that loaded it ({lost})") from None
        return f"ended its process ({lost})"

    def started(self, answer: Any, hint: str = "") -> None:
        """Take the answer to the first call: ["ready", ...], or why the worker cannot be used.

        Raises:
            ComponentError: ["refused", problem, fix, trace]; UserCodeError: ["raised", problem, "", trace].
        """
        how, *rest = answer
        if how == "ready":
            self.ready, self.deadline = True, float("inf")
        elif how == "refused":
            raise ComponentError(*rest)
        else:
            raise UserCodeError(f"loading {self._what} raised {rest[0]}{hint}\n{rest[2]}")


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
            os._exit(1)  # nobody would hear what a thread raises

    return partial(ThreadPoolExecutor(at_once).submit, do)


def limit(kind: int, value: int) -> None:
    """Lower a limit of this process, as far as the system allows."""
    hard = resource.getrlimit(kind)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _contain(containment: Containment) -> None:
    limit(resource.RLIMIT_CORE, 0)
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
    """What needs the privileges that a process in a sandbox gives up."""
    if containment.runs_code:
        from retrain.system.model_code import start_launcher  # of no use to the workers of rewards

        start_launcher(containment.memory_mb)


def _command(module: str, python: str | None) -> list[str]:
    """What runs a module of this package. Another interpreter must not find what is installed beside the package."""
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
