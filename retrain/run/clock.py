"""Wall time of the phases of one step."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from retrain.types import Metrics


class Clock:
    """Times phases by name; those of two threads may run at once, under names of their own.

    Attributes:
        tokens: sampled in the phase "rollout".
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
        """time/PHASE_s, time/step_s, and sampled tokens per second of rollout.

        Where the loop waited for a rollout in a thread, time/overlap_s is what it did not have to wait.
        """
        metrics = {f"time/{phase}_s": seconds for phase, seconds in self.spent.items()}
        if "rollout" in self.spent:
            rollout = self.spent["rollout"]
            metrics["time/tokens_per_s"] = self.tokens / max(rollout, 1e-9)
            if "wait" in self.spent:
                metrics["time/overlap_s"] = max(0.0, rollout - self.spent["wait"])
        return metrics | {"time/step_s": time.perf_counter() - self.began}
