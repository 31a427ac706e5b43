"""Stop a run before its last step, because of a signal or a metric.

After SIGTERM the run finishes the current step. It ends at once if no step has begun, or if SIGTERM
arrives a second time. Ctrl-C always ends it at once.
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
    """Context manager that records the signal that asks the run to stop.

    Args:
        again: ends the message of a stop before a step began: what starts the work again.

    Attributes:
        requested: name of the signal; "" until one arrives.
        deferred: a step may be in progress, and SIGTERM lets it finish. While this is False there is
            nothing to save, and SIGTERM raises Preempted at once.
    """

    numbers = (signal.SIGTERM, signal.SIGINT)

    def __init__(self, again: str = "--resume auto starts again") -> None:
        self.requested = ""
        self.deferred = False
        self._again = again
        self._arrived = False
        self._notify: Callable[[], None] | None = None

    def defer(self, notify: Callable[[], None]) -> None:
        """Let a step in progress finish from now on, and call `notify` when SIGTERM arrives."""
        self._notify, self.deferred = notify, True

    def receive(self, number: int) -> None:
        """Record the signal. Stop at once if no step is in progress or a signal arrived before."""
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        if self._arrived:
            # The step takes too long. The previous checkpoint is intact, so exit now.
            os._exit(Preempted.exit_code)
        self._arrived = True
        self.requested = self.requested or signal.Signals(number).name
        if not self.deferred:
            raise Preempted(f"stopped by {self.requested} before a step began; {self._again}")
        if self._notify is not None:
            self._notify()


class StopCondition:
    """Observer for `[training] stop_when`: ends the run once the metric meets its condition.

    The decision depends only on the run's metric rows. A resumed run reads them again, and so ends
    after the same step as an uninterrupted one.

    Args:
        directory: holds the rows; its `stopped` is set to the reason for ending the run.
        observe: receives every event first.
    """

    def __init__(self, settings: StopWhen, directory: RunDirectory, observe: Observer) -> None:
        self._settings, self._directory, self._observe = settings, directory, observe
        self._best, self._count = -inf, 0
        file = directory.path / ("eval.jsonl" if settings.event == "eval" else "metrics.jsonl")
        for row in directory.ranks.on_rank0(lambda: read_rows(file)):
            self._check(row)

    def __call__(self, event: str, details: Mapping[str, Any]) -> None:
        """Pass the event on, and check the row if it may hold the metric."""
        self._observe(event, details)
        if event == self._settings.event:
            self._check(details)

    def _check(self, row: Mapping[str, Any]) -> None:
        settings = self._settings
        value = row.get(settings.key)
        if value is None or self._directory.stop_reason:
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
            self._directory.stop_reason = f"after {steps} steps {why}{times}"
