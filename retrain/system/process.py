"""Commands that end with their parent, signal handlers of a block, and the number of CPU threads."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing import Self

_PR_SET_PDEATHSIG = 1
_WATCHER = 'read _ || { kill -s TERM -- "-$0"; sleep 5; kill -s KILL -- "-$0"; }'
"""Shell program that ends a process group at the end of its standard input, unless it reads a line first.

The kernel ends a command with its parent, but not the helpers of the command, which may have been killed, too."""
_AGAIN_S = 0.05
"""After how long a signal is sent again: by then the finalizer has ended, or else it is sent once more."""
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which the runtimes of GCC, Intel and LLVM know how long a thread spins before it sleeps."""
_PARAMETERS_PER_THREAD = 5_000_000
"""From the third thread on: below that a product is over before more threads have begun it."""


def usable_cores() -> int:
    """Cores that this process may use; all of the machine's where the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_threads(parameters: int, sharing: int = 1) -> int:
    """Threads for the training of a model on a processor.

    OMP_NUM_THREADS where it is set, read from the environment and not from torch: a fork has torch as its maker set it
    up. Otherwise min(cores / sharing, max(2, parameters / 5 million)), and at least 1, of the cores that this process
    may use.

    Args:
        parameters: of the model.
        sharing: processes, and threads with products of their own, among which the cores are divided.
    """
    if (said := os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]).isdecimal() and int(said):
        return int(said)
    return max(1, min(usable_cores() // sharing, max(2, parameters // _PARAMETERS_PER_THREAD)))


def wait_asleep() -> None:
    """Let OpenMP's threads sleep while they wait for each other, as OMP_WAIT_POLICY = passive says.

    By default they spin for a millisecond after every product, which on a machine that others use keeps the thread that
    is waited for from its processor. Call it before torch is imported, for its runtime reads the environment then;
    whoever has set one of the variables has decided.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["OMP_WAIT_POLICY"] = "passive"


def follower(parent: int, number: int = signal.SIGTERM, code: int = 0) -> Callable[[], None]:
    """A function that a child of `parent` calls, itself or as a `preexec_fn`, to end with it.

    The kernel sends the signal when the *thread* that started the child ends, so that thread has to stay. The
    child's own children follow nobody. Only Linux can do this; elsewhere the function does nothing.

    Args:
        number: the signal.
        code: exit code of a child whose parent has died before the call.
    """
    if sys.platform != "linux":
        return lambda: None
    prctl = ctypes.CDLL(None).prctl  # loaded here: after a fork nothing may be imported

    def follow() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(code)

    return follow


def start(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    own_process_group: bool = True,
    follow: int | None = signal.SIGTERM,
    code: int = 0,
    **streams: Any,
) -> subprocess.Popen[Any]:
    """Start a command that ends with the thread that starts it. Every command but a worker starts here.

    Args:
        environment: variables besides those of this process.
        own_process_group: it leads a session and a process group, which `end` ends and Ctrl-C in the terminal
            does not reach.
        follow, code: see `follower`. None: the command outlives this process, or follows it by itself. That is
            for a process with several threads, in which nothing may run between fork and exec.
        streams: standard streams, working directory and encoding, as of `subprocess.Popen`.
    """
    return subprocess.Popen(  # noqa: S603 - commands of this package
        command,
        env={**os.environ, **(environment or {})},
        start_new_session=own_process_group,
        preexec_fn=None if follow is None else follower(os.getpid(), follow, code),
        **streams,
    )


@contextmanager
def process_group(
    command: Sequence[str], environment: Mapping[str, str], *, grace_s: float, **streams: Any
) -> Generator[subprocess.Popen[Any]]:
    """Run a command that starts helpers of its own; none of them is left after the block or this process.

    Args:
        grace_s: see `end`.
    """
    process = start(command, environment, **streams)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    watcher = start(["/bin/sh", "-c", _WATCHER, str(process.pid)], follow=None, stdin=subprocess.PIPE, **quiet)
    try:
        yield process
    finally:
        end(process, grace_s)
        watcher.communicate(b"\n")


class Process(Protocol):
    """A process as its parent sees it; `subprocess.Popen` is one."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the exit code. Raises subprocess.TimeoutExpired."""
        ...

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        ...


def end(process: Process, grace_s: float = 0.0) -> None:
    """End a process that leads a group, and the whole group; harmless if it has ended.

    Args:
        grace_s: seconds that the process has to end after SIGTERM, before SIGKILL goes to the group.
    """
    if grace_s:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class SignalHandler(ABC):
    """Context manager inside whose block signals call `receive`. Only the main thread can enter it.

    A signal that the process was started to ignore, such as Ctrl-C in a background job, stays ignored. Python drops
    what is raised while it finalizes an object: such a signal is sent again.

    Attributes:
        numbers: the signals.
    """

    numbers: tuple[int, ...] = (signal.SIGTERM,)
    _raised: tuple[int, BaseException | None] = (0, None)

    def __enter__(self) -> Self:
        handled = [number for number in self.numbers if signal.getsignal(number) != signal.SIG_IGN]
        self._previous = {number: signal.signal(number, lambda number, _: self._receive(number)) for number in handled}
        self._hook, sys.unraisablehook = sys.unraisablehook, self._dropped
        return self

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int) -> None:
        try:
            self.receive(number)
        except BaseException as error:
            self._raised = number, error
            raise

    def _dropped(self, dropped: Any) -> None:
        number, error = self._raised
        if error is None or dropped.exc_value is not error:
            self._hook(dropped)
            return
        again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    @abstractmethod
    def receive(self, number: int) -> None:
        """Handler of a signal."""


class Leave(SignalHandler):
    """SIGTERM raises SystemExit(0), unless the process is leaving already."""

    under_way = False

    def receive(self, number: int) -> None:
        if not self.under_way:
            raise SystemExit(0)
