"""Child processes that do not outlive their parent, and signals that are handled inside a block."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self

_PR_SET_PDEATHSIG = 1


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


def end(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
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

    A signal that the process was started to ignore, such as Ctrl-C in a background job, stays ignored.

    Attributes:
        numbers: the signals.
    """

    numbers: tuple[int, ...] = (signal.SIGTERM,)

    def __enter__(self) -> Self:
        heard = [number for number in self.numbers if signal.getsignal(number) != signal.SIG_IGN]
        self._previous = {number: signal.signal(number, lambda number, _: self.receive(number)) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @abstractmethod
    def receive(self, number: int) -> None:
        """What a signal does."""


class Leave(SignalHandler):
    """SIGTERM raises SystemExit(0), unless the process is leaving already."""

    under_way = False

    def receive(self, number: int) -> None:
        if not self.under_way:
            raise SystemExit(0)
