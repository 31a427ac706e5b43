"""SIGTERM asks a run to stop after the current step; before the first step, and the second time, it ends at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from retrain.errors import Preempted


class Stop:
    """Context manager; `requested` names the signal once it has arrived, and is empty before.

    Attributes:
        deferred: a step may be under way. Until this is set there is nothing to save, and the signal
            raises Preempted wherever the run is.
    """

    def __init__(self) -> None:
        self.requested = ""
        self.deferred = False
        self._tell: Callable[[], None] | None = None
        self._previous: Any = None

    def __enter__(self) -> Stop:
        self._previous = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def defer(self, tell: Callable[[], None]) -> None:
        """From now on a step may be under way, which the signal lets end; when it arrives, `tell` is called."""
        self._tell, self.deferred = tell, True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            # The step does not end in time: leave now, the previous checkpoint is intact.
            os._exit(Preempted.exit_code)
        self.requested = signal.Signals(number).name
        if not self.deferred:
            raise Preempted(f"stopped by {self.requested} with no step under way; --resume auto starts again")
        if self._tell is not None:
            self._tell()
