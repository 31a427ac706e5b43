"""A curriculum: problems that nobody solved come again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain import Problem, curriculum


@curriculum("again")
class Again:
    """A problem that nobody solved comes again, every other time.

    Args:
        first: problems of the task that it looks at.
    """

    def __init__(self, task: Any, *, first: int = 100) -> None:
        self.task, self.first = task, first
        self.hard: list[int] = []

    def problem(self, index: int) -> Problem:
        """Problem number `index`, or one of the hard ones."""
        again = self.hard and index % 2
        return self.task.problem(self.hard[index % len(self.hard)] if again else index)

    def learn(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Note which problems of the step nobody solved."""
        numbers = {self.task.problem(number).id: number for number in range(self.first)}
        self.hard = sorted({numbers[name] for name, rate in rates.items() if rate == 0 and name in numbers})
        return {"again/hard": float(len(self.hard))}

    def heldout(self, count: int) -> list[Problem]:
        """Those of the task."""
        return self.task.heldout(count)

    def state_dict(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"hard": self.hard}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Of a checkpoint."""
        self.hard = [*state["hard"]]
