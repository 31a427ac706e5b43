"""What ends a run before its last step: a signal, or a metric.

SIGTERM asks a run to stop after the current step; before the first step, and the second time, it ends at once.
Ctrl-C ends it wherever it is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from math import inf
from typing import TYPE_CHECKING, Any

from retrain.errors import Preempted
from retrain.storage.run_files import read_rows
from retrain.system.process import SignalHandler
from retrain.types import Observer

if TYPE_CHECKING:
    from retrain.config.sections.heldout import StopWhen
    from retrain.storage.run_directory import RunDirectory


class Stop(SignalHandler):
    """Context manager; `requested` names the signal once it has arrived, and is empty before.

    Attributes:
        deferred: a step may be under way. Until this is set there is nothing to save, and SIGTERM
            raises Preempted wherever the run is.
    """

    numbers = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.requested = ""
        self.deferred = False
        self._came = False
        self._tell: Callable[[], None] | None = None

    def defer(self, tell: Callable[[], None]) -> None:
        """From now on a step may be under way, which SIGTERM lets end; when it arrives, `tell` is called."""
        self._tell, self.deferred = tell, True

    def receive(self, number: int) -> None:
        """Remember the signal, and stop at once if nothing is under way or it came before."""
        if number == signal.SIGINT:
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


class StopCondition:
    """`[training] stop_when`: an observer that ends the run when a metric has got there, with a reason.

    It depends on the run's rows alone. A resumed run reads them again, and ends where it would have ended.

    Args:
        directory: its rows are read, and its `stopped` gets the reason.
        observe: gets every event first.
    """

    def __init__(self, settings: StopWhen, directory: RunDirectory, observe: Observer) -> None:
        self._settings, self._directory, self._observe = settings, directory, observe
        self._best, self._count = -inf, 0
        file = directory.path / ("eval.jsonl" if settings.event == "eval" else "metrics.jsonl")
        for row in directory.ranks.on_rank0(lambda: read_rows(file)):
            self._see(row)

    def __call__(self, event: str, details: Mapping[str, Any]) -> None:
        """Take in a row of the metric, and pass every event on."""
        self._observe(event, details)
        if event == self._settings.event:
            self._see(details)

    def _see(self, row: Mapping[str, Any]) -> None:
        settings = self._settings
        value = row.get(settings.key)
        if value is None or self._directory.stopped:
            return
        bound, sign = (settings.above, ">=") if settings.above is not None else (settings.below, "<=")
        if bound is None:
            bound = self._best
        reached = value >= bound if sign == ">=" else value <= bound
        self._best, self._count = max(self._best, value), self._count + 1 if reached else 0
        if self._count >= (settings.patience or settings.rows):
            steps = row["step"] + (settings.event == "step")
            why = f"{settings.metric} = {value:.4g} {sign} {bound:.4g}"
            times = f", {self._count} times in a row" if self._count > 1 else ""
            self._directory.stopped = f"after {steps} steps {why}{times}"
