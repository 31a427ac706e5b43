"""SIGTERM asks a run to stop after the current step; before the first step, and the second time, it ends at once.

Ctrl-C ends it wherever it is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from retrain.errors import Preempted
from retrain.system.process import SignalHandler


class Stop(SignalHandler):
    """Context manager; `requested` names the signal once it has arrived, and is empty before.

    Attributes:
        deferred: a step may be under way. Until this is set there is nothing to save, and SIGTERM
            raises Preempted wherever the run is.
        interrupted: Ctrl-C came, and KeyboardInterrupt was raised wherever the run was.
    """

    numbers = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = ""
        self.deferred = False
        self.interrupted = False
        self._came = False
        self._tell: Callable[[], None] | None = None

    def defer(self, tell: Callable[[], None]) -> None:
        """From now on a step may be under way, which SIGTERM lets end; when it arrives, `tell` is called."""
        self._tell, self.deferred = tell, True

    def receive(self, number: int) -> None:
        """Remember the signal, and stop at once if nothing is under way or it came before."""
        if number == signal.SIGINT:
            self.interrupted = True
            raise KeyboardInterrupt
        if self._came:
            # The step does not end in time: leave now, the previous checkpoint is intact.
            os._exit(Preempted.exit_code)
        self._came = True
        self.requested = self.requested or signal.Signals(number).name
        if not self.deferred:
            raise Preempted(f"stopped by {self.requested} with no step under way; --resume auto starts again")
        if self._tell is not None:
            self._tell()
