"""Stop a run before its last step, because of a signal or a metric.

After SIGTERM or Ctrl-C the run finishes the current step and saves. It ends at once if no step has begun, or if a
second signal arrives.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

from retrain.errors import Preempted
from retrain.storage.run_files import read_rows
from retrain.system.process import SignalHandler
from retrain.types import Observer

if TYPE_CHECKING:
    from retrain.config.sections.heldout import StopWhen
    from retrain.storage.run_directory import RunDirectory

_CTRL_C = "Ctrl-C"


class Stop(SignalHandler):
    """Context manager that records the signal that asks the run to stop.

    Args:
        again: ends the message of a stop before a step began: how to start the work again.
        observe: receives the message that the step in progress is finished first.
        held: note a signal until the block of `at_once` begins instead of acting on it.

    Attributes:
        requested: "SIGTERM" or "Ctrl-C"; "" until a signal arrives.
        deferred: a step may be in progress, and the first signal lets it finish. While this is False there is
            nothing to save, and a signal stops the run at once.
    """

    numbers = (signal.SIGTERM, signal.SIGINT)

    def __init__(
        self, again: str = "--resume auto starts again", observe: Observer = lambda *_: None, *, held: bool = False
    ) -> None:
        self.requested = ""
        self.deferred = False
        self._again = again
        self._observe = observe
        self._held = held
        # Not `requested`, which the loop also sets when another rank received the signal.
        self._arrived = False
        self._notify: Callable[[], None] | None = None

    @contextmanager
    def at_once(self) -> Generator[None]:
        """In this block a signal, also one that was noted before, ends the run at once until `defer` is called.

        The start-up tries the parts of a model, and treats every Exception as an answer of the part. So `receive`
        raises KeyboardInterrupt for all signals, which becomes the exception of the signal here.
        """
        self._held = False
        try:
            self._check()
            yield
        except KeyboardInterrupt:
            if self.deferred or not self.requested:
                raise
            raise self.stopped(f" before a step began; {self._again}") from None

    def defer(self, notify: Callable[[], None]) -> None:
        """Let a step in progress finish from now on, and call `notify` when the first signal arrives."""
        # Code of others may have caught even a KeyboardInterrupt, and what it was computing may be wrong.
        self._check()
        self._notify, self.deferred = notify, True

    def _check(self) -> None:
        if self._arrived:
            raise KeyboardInterrupt

    def stopped(self, how: str) -> BaseException:
        """Return the exception that ends the run: KeyboardInterrupt (exit code 130) after Ctrl-C, else Preempted."""
        text = f"stopped by {self.requested}{how}"
        if self.requested != _CTRL_C:
            return Preempted(text)
        interrupt = KeyboardInterrupt()
        interrupt.add_note(text)
        return interrupt

    def receive(self, number: int) -> None:
        """Record the signal. Stop at once if no step is in progress or a signal arrived before."""
        first, self._arrived = not self._arrived, True
        name = _CTRL_C if number == signal.SIGINT else signal.Signals(number).name
        self.requested = self.requested or name
        if first and self._held:
            return
        if first and self.deferred:
            self._announce(name)
            if self._notify is not None:
                self._notify()
        elif first or number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            # The step takes too long. The previous checkpoint is intact, so exit now.
            os._exit(Preempted.exit_code)

    def _announce(self, name: str) -> None:
        text = f"{name}: the run finishes its step, saves and ends; a second signal ends it at once"
        # In a thread, because the signal may have interrupted a print, which cannot be entered twice.
        details = {"text": text, "level": "info"}
        threading.Thread(target=self._observe, args=("message", details), daemon=True).start()


_MAX_ABSENT = 10
"""Rows without the metric of `stop_when` after which a warning says so: some metrics are not in every step."""


class StopCondition:
    """Observer for `[training] stop_when`: ends the run once the metric meets its condition.

    The decision depends only on the run's metric rows. A resumed run reads them again, and so ends
    after the same step as an uninterrupted one.

    Args:
        directory: holds the rows; its `stop_reason` is set to the reason for ending the run.
        observe: receives every event first.
    """

    def __init__(self, settings: StopWhen, directory: RunDirectory, observe: Observer) -> None:
        self._settings, self._directory, self._observe = settings, directory, observe
        self._best, self._count, self._absent = -inf, 0, 0
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
        # Minus infinity: once the metric was there, it is never missed again.
        self._absent = self._absent + 1 if value is None else -inf
        if self._absent == _MAX_ABSENT:
            text = f"[training] stop_when: {_MAX_ABSENT} rows have no {settings.metric}; it stops nothing yet"
            self._observe("message", {"text": text, "level": "warning"})
        if value is None or self._directory.stop_reason:
            return
        bound, sign = (settings.above, ">=") if settings.above is not None else (settings.below, "<=")
        if bound is None:
            # patience: a value that is not above the best so far counts.
            bound = self._best
        reached = value >= bound if sign == ">=" else value <= bound
        self._best, self._count = max(self._best, value), self._count + 1 if reached else 0
        if self._count >= (settings.patience or 1):
            steps = row["step"] + (settings.event == "step")
            why = f"{settings.metric} = {value:.4g} {sign} {bound:.4g}"
            times = f", {self._count} times in a row" if self._count > 1 else ""
            self._directory.stop_reason = f"after {steps} steps {why}{times}"
