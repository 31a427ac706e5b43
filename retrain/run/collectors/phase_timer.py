"""Wall time of the phases of a step."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from retrain.types import Metrics


class PhaseTimer:
    """Measures the wall time of each phase of a step.

    Two threads may time phases of different names at once.

    Attributes:
        began: time at which the step began, in seconds of `time.perf_counter`.
        spent: seconds of each phase.
        tokens: number of tokens sampled in the phase "rollout".
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.spent: dict[str, float] = {}
        self.tokens = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        began = time.perf_counter()
        yield
        self.spent[phase] = self.spent.get(phase, 0.0) + time.perf_counter() - began

    def metrics(self) -> Metrics:
        """Return time/PHASE_s and time/step_s in seconds, and time/tokens_per_s of the rollout.

        If a thread sampled, time/overlap_s is the part of its time during which the loop did not
        wait for it.
        """
        metrics = {f"time/{phase}_s": seconds for phase, seconds in self.spent.items()}
        if "rollout" in self.spent:
            rollout = self.spent["rollout"]
            metrics["time/tokens_per_s"] = self.tokens / max(rollout, 1e-9)
            if "wait" in self.spent:
                metrics["time/overlap_s"] = max(0.0, rollout - self.spent["wait"])
        return metrics | {"time/step_s": time.perf_counter() - self.began}
