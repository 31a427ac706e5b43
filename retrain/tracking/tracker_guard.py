"""Wrapper that keeps a tracker from stopping, slowing or failing a run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from retrain.protocols import Tracker
from retrain.registry.call import described
from retrain.types import Observer

_WAITING = 1000
"""Maximum number of calls that wait for a slow tracker."""


class SafeTracker(Tracker):
    """Run a tracker in another thread, and disable it with one warning at its first failure.

    `log` and `completions` return immediately; `close` waits at most `patience_s` seconds. A tracker is disabled if it
    raises, falls `_WAITING` calls behind, or does not finish within `patience_s` seconds of `close`. metrics.jsonl has
    every row in any case.

    Args:
        name: name of the tracker, for messages.
        tracker: the tracker.
        observe: called with the location of the tracker's page ("tracker") and with the warning ("message").
        patience_s: maximum number of seconds that `close` waits.
    """

    def __init__(self, name: str, tracker: Tracker, observe: Observer, patience_s: float = 30.0) -> None:
        self.name = name
        self._tracker = tracker
        self._observe = observe
        self._patience = patience_s
        self._work: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._disabled = threading.Event()
        # A daemon, so that a library that hangs cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue the metrics of a step."""
        # The run may change its dict while the other thread still waits to send it.
        copied = dict(metrics)
        self._put(lambda: self._tracker.log(step, copied))

    def resumed(self, rows: Sequence[tuple[int, Mapping[str, float]]]) -> None:
        """Queue the rows of the steps before a resume."""
        copied = [(step, dict(metrics)) for step, metrics in rows]
        self._put(lambda: self._tracker.resumed(copied))

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Queue the completions of a step."""
        self._put(lambda: self._tracker.completions(step, rows))

    def close(self) -> None:
        """Wait for the tracker to finish, at most `patience_s` seconds."""
        self._put(None)
        if not self._disabled.is_set():
            self._thread.join(self._patience)
            if self._thread.is_alive():
                self._disable(f"did not finish within {self._patience:g} s")

    def _put(self, work: Callable[[], None] | None) -> None:
        if self._disabled.is_set():
            return
        try:
            # Never a wait: a service that hangs must not slow training.
            self._work.put_nowait(work)
        except queue.Full:
            self._disable(f"is {_WAITING} rows behind")

    def _run(self) -> None:
        try:
            reported = ""
            while (work := self._work.get()) is not None:
                work()
                # Read in this thread, because the attribute may be a property that raises.
                if (where := self._tracker.where) != reported:
                    self._observe("tracker", {"name": self.name, "where": where})
                    reported = where
            self._tracker.close()
        except BaseException as error:  # includes SystemExit, because some libraries exit on bad credentials
            self._disable(f"raised {described(error)}")

    def _disable(self, reason: str) -> None:
        if not self._disabled.is_set():
            self._disabled.set()
            text = f"tracker {self.name} {reason}; training continues without it, metrics.jsonl is complete"
            self._observe("message", {"text": text, "level": "warning"})
