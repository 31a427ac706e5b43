"""Start commands that end with their parent, handle signals inside a block, and choose the number of CPU threads."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from typing import Self

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCHER = 'read _ || { kill -s TERM -- "-$0"; sleep 5; kill -s KILL -- "-$0"; }'
"""Shell program that kills a process group when its standard input is closed, unless it reads a line first.

The kernel ends a command with its parent, but not the children of the command. The command may have been killed too, so
that it cannot end them itself."""
_CLEANER = 'read _ || { rm -rf -- "$0"; sleep 5; rm -rf -- "$0"; }'
"""Shell program that deletes a folder when its standard input is closed, unless it reads a line first; once more after
processes that were using the folder have had time to end."""
_RESEND_S = 0.05
"""Delay in seconds before a signal is sent again. If the finalizer still runs then, the signal is sent once more."""
_WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that tell the OpenMP runtimes of GCC, Intel and LLVM how long a waiting thread spins."""
SPIN_COUNT = 10_000
"""Rounds that a waiting thread spins on a quiet machine before it sleeps, see `spin_if_quiet` and dev/log.md."""
_QUIET_CORES, _WATCH_S = 0.25, 0.2
"""A machine is quiet if other processes use fewer cores than this, on average over at least these seconds."""
_PARAMETERS_PER_THREAD = 5_000_000
"""Parameters per thread for the third thread and further ones. The matrix products of a smaller model finish before
more threads have started on them."""


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use; all cores if the system has no CPU affinity."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_threads(parameters: int, sharing: int = 1) -> int:
    """Return the number of threads for training a model on a CPU.

    This is OMP_NUM_THREADS if it is set. It is read from the environment instead of from torch, because a forked
    process inherits the settings of its parent's torch. Otherwise it is

        max(1, min(cores / sharing, max(2, parameters / 5 million)))

    rounded down, where `cores` are those that this process may use.

    Args:
        parameters: number of parameters of the model.
        sharing: number of processes, or of threads that compute independently, among which the cores are divided.
    """
    # "4,2" is a number for each nesting level, of which the first is the outer one.
    if (value := os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]).isdecimal() and int(value):
        return int(value)
    return max(1, min(usable_cores() // sharing, max(2, parameters // _PARAMETERS_PER_THREAD)))


def busy_seconds() -> float | None:
    """Return the CPU time in seconds that other processes have had of the usable cores; None without /proc/stat."""
    with suppress(OSError, AttributeError):  # macOS has neither the file nor CPU affinity
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
        # user, nice, system, irq, softirq, steal: not idle and iowait; guest time is counted in user and nice already
        ticks = sum(int(line[column]) for line in lines if line[0] in ours for column in (1, 2, 3, 6, 7, 8))
        # /proc/stat counts this process as well.
        return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()
    return None


class ThreadWaiting:
    """Choice of how OpenMP threads wait for each other, with its reason.

    They wait after every matrix product. By default they spin for about a millisecond. On a busy machine they then
    occupy the core that the awaited thread needs, and a step takes ten times as long. If they sleep at once instead, a
    step of a small model on a quiet machine takes a third longer. So: `sleep` first; then `spin_if_quiet`, before torch
    is imported, by this package or by a plug-in, because its OpenMP runtime reads the environment at import. Neither
    changes anything after the user has set one of `_WAIT_VARIABLES`.

    Attributes:
        reason: a phrase for people; None before `sleep`.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self._since: tuple[float, float] | None = None

    def sleep(self) -> None:
        """Set OMP_WAIT_POLICY=passive, and begin to watch how busy the cores are."""
        chosen = [f"{name}={os.environ[name]}" for name in _WAIT_VARIABLES if name in os.environ]
        if chosen:
            self.reason = f"{', '.join(chosen)} (from the environment)"
            return
        os.environ["OMP_WAIT_POLICY"] = "passive"
        self.reason = "threads sleep while they wait"
        busy = busy_seconds()
        self._since = None if busy is None else (time.monotonic(), busy)

    def spin_if_quiet(self) -> None:
        """Set GOMP_SPINCOUNT=SPIN_COUNT if other processes have left the cores idle since `sleep`.

        It waits until `_WATCH_S` have passed since then. Later load does not change the setting.
        """
        if self._since is None or usable_cores() == 1 or os.environ.get("OMP_NUM_THREADS") == "1":
            return
        (began, before), self._since = self._since, None
        time.sleep(max(0.0, _WATCH_S - (time.monotonic() - began)))
        busy = max(0.0, (busy_seconds() or before) - before) / (time.monotonic() - began)
        load = f"{busy:.1f} of {usable_cores()} cores were busy"
        if busy < _QUIET_CORES:
            os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
            self.reason = f"threads spin {SPIN_COUNT} times before they sleep: {load}"
        else:
            self.reason = f"threads sleep while they wait: {load}"


thread_waiting = ThreadWaiting()
"""The setting of this process."""


def follower(parent: int, number: int = signal.SIGTERM, code: int = 0) -> Callable[[], None]:
    """Return a function that a child process calls, directly or as `preexec_fn`, to end when its parent ends.

    The kernel sends the signal when the *thread* that started the child ends, so that thread must keep running. The
    setting does not extend to the child's own children. It exists only on Linux; elsewhere the function does nothing.

    Args:
        parent: PID of the parent.
        number: the signal that the child gets.
        code: exit code of a child whose parent has ended before the call.
    """
    if sys.platform != "linux":
        return lambda: None
    # Loaded before the fork: another thread may hold the import lock, which the fork would wait for forever.
    prctl = ctypes.CDLL(None).prctl

    def follow() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        # The parent may have ended before the kernel knew of the wish.
        if os.getppid() != parent:
            os._exit(code)

    return follow


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that `descendants` finds them. Only Linux has this."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children and so on; nothing without /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            # The name of the program, in parentheses, may contain anything; state and parent follow it.
            parent = int(stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    below = list(children.get(pid, ()))
    for child in below:  # grows while it is read
        below += children.get(child, ())
    return below


def start(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    follow: int | None = signal.SIGTERM,
    code: int = 0,
    **streams: Any,
) -> subprocess.Popen[Any]:
    """Start a command that ends when the calling thread ends.

    The command leads its own session and process group, so that `end` can kill the group and Ctrl-C in the terminal
    does not reach it.

    Args:
        command: the program and its arguments.
        environment: environment variables to add to those of this process.
        follow: signal that the command gets when the calling thread ends, see `follower`. With None the command
            outlives this process or calls `follower` itself. Use None in a process with several threads, in which it
            is unsafe to run Python code between fork and exec.
        code: exit code if this process has ended before the command starts, see `follower`.
        streams: further arguments of `subprocess.Popen`: standard streams, working directory, encoding.
    """
    return subprocess.Popen(  # noqa: S603 - commands of this package
        command,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
        preexec_fn=None if follow is None else follower(os.getpid(), follow, code),
        **streams,
    )


@contextmanager
def process_group(
    command: Sequence[str], environment: Mapping[str, str], *, grace_s: float, **streams: Any
) -> Generator[subprocess.Popen[Any]]:
    """Run a command inside the block, and kill its whole process group when the block or this process ends.

    Args:
        command: the program and its arguments.
        environment: environment variables to add to those of this process.
        grace_s: seconds between SIGTERM and SIGKILL, see `end`.
        streams: further arguments of `subprocess.Popen`.
    """
    process = start(command, environment, **streams)
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    watcher = start(["/bin/sh", "-c", _WATCHER, str(process.pid)], follow=None, stdin=subprocess.PIPE, **quiet)
    try:
        yield process
    finally:
        end(process, grace_s)
        watcher.communicate(b"\n")


@contextmanager
def scratch_folder(prefix: str) -> Generator[Path]:
    """Yield a new temporary folder, which is deleted when the block ends or this process is killed.

    Args:
        prefix: beginning of the folder's name.
    """
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as folder:
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        cleaner = start(["/bin/sh", "-c", _CLEANER, folder], follow=None, stdin=subprocess.PIPE, **quiet)
        try:
            yield Path(folder)
        finally:
            cleaner.communicate(b"\n")


class Process(Protocol):
    """Interface to a child process. `subprocess.Popen` and `retrain.system.fork.Fork` implement it."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        ...

    def terminate(self) -> None:
        """Send SIGTERM unless the process has ended."""
        ...


def end(process: Process, grace_s: float = 0.0) -> None:
    """Kill the process group that a process leads, and wait for the process. It may have ended already.

    Args:
        process: the leader of the group.
        grace_s: seconds that the leader gets to end after SIGTERM, before the group gets SIGKILL. 0 sends no SIGTERM.
    """
    if grace_s:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    # Without it the ended process would stay as a zombie, and its PID would count as alive.
    process.wait()


class SignalHandler(ABC):
    """Context manager that calls `receive` for signals inside its block.

    Python allows handlers only in the main thread; in another one the context manager does nothing. Signals that are
    ignored on entry stay ignored, such as Ctrl-C in a background job. Python discards exceptions that are raised while
    it finalizes an object. If it discards one that `receive` raised, the signal is sent again.

    Attributes:
        numbers: the signals to handle.
    """

    numbers: tuple[int, ...] = (signal.SIGTERM,)
    _raised: tuple[int, BaseException | None] = (0, None)

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        handled = [number for number in self.numbers if main and signal.getsignal(number) != signal.SIG_IGN]
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
        # Other exceptions in finalizers are none of this handler's.
        if error is None or dropped.exc_value is not error:
            self._hook(dropped)
            return
        again = threading.Timer(_RESEND_S, os.kill, (os.getpid(), number))
        again.daemon = True
        again.start()

    @abstractmethod
    def receive(self, number: int) -> None:
        """Handle the signal `number`."""


class ExitOnSigterm(SignalHandler):
    """Signal handler that raises SystemExit(0) at SIGTERM, except while `exiting` is True.

    Attributes:
        exiting: set by the user of the class when the process has begun to exit.
    """

    exiting = False

    def receive(self, number: int) -> None:
        if not self.exiting:
            raise SystemExit(0)


def launched() -> bool:
    """Return True if `--ranks` or torchrun started this process as a rank."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ
