"""Random mixture of several tasks: the task of `[[environments]]`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import NamedTuple

from retrain.functional.seeds import derive_seed
from retrain.protocols import Task
from retrain.types import Metrics, Problem, Rollout, State


class WeightedTask(NamedTuple):
    """A task and its sampling weight relative to the others."""

    task: Task
    weight: float


class Mixture(Task):
    """Draws a task for every problem and takes the problems of each task in order.

    Problem number `index` depends only on the seed, the weights and `index`, so a resumed run
    continues the same sequence.

    Args:
        seed: seed of the draws.
        parts: tasks by label; a problem has the label of its task in its field `environment`.
    """

    def __init__(self, seed: int, parts: Mapping[str, WeightedTask]) -> None:
        self._seed, self._parts = seed, parts
        self._drawn: list[tuple[str, int]] = []  # label, and number within its task, of every problem so far
        self._counts = dict.fromkeys(parts, 0)

    def problem(self, index: int) -> Problem:
        """Return training problem number `index`."""
        labels, weights = list(self._parts), [part.weight for part in self._parts.values()]
        # The number within its task depends on all draws before, so they are made in order and kept.
        while len(self._drawn) <= index:
            [label] = Random(derive_seed(self._seed, "mix", len(self._drawn))).choices(labels, weights)
            self._drawn.append((label, self._counts[label]))
            self._counts[label] += 1
        label, number = self._drawn[index]
        return _labelled(label, self._parts[label].task.problem(number))

    def heldout(self, count: int) -> list[Problem]:
        """Return `count` held-out problems, equally many of each task regardless of the weights."""
        share, rest = divmod(count, len(self._parts))
        return [
            _labelled(label, problem)
            for index, (label, part) in enumerate(self._parts.items())
            for problem in part.task.heldout(share + (index < rest))
        ]

    def finite(self) -> Iterator[Problem]:
        """Return all problems of the tasks that hold a finite list of problems in memory."""
        return (_labelled(label, problem) for label, part in self._parts.items() for problem in part.task.finite())

    def fingerprint(self) -> str | None:
        """Return a hash of the tasks' data and weights; None if a task has no fingerprint."""
        facts = [(label, part.weight, part.task.fingerprint()) for label, part in self._parts.items()]
        # Without all of them, other data could pass for the same.
        if any(fingerprint is None for _, _, fingerprint in facts):
            return None
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return the metrics that every task computes from the answers to its problems, named `LABEL/NAME`."""
        metrics = Metrics()
        for label, part in self._parts.items():
            rows = [row for row, problem in enumerate(problems) if problem.environment == label]
            # A mean over no problems would be reported as 0.
            figures = part.task.figures([problems[row] for row in rows], [answers[row] for row in rows]) if rows else {}
            metrics |= {f"{label}/{name}": value for name, value in figures.items()}
        return metrics

    def learn(self, rates: Mapping[str, float]) -> Metrics:
        """Pass every task the success rates of its problems; return its metrics as `LABEL/NAME`."""
        metrics = Metrics()
        for label, part in self._parts.items():
            rates_of_part = {
                name.removeprefix(f"{label}/"): rates[name] for name in rates if name.startswith(f"{label}/")
            }
            metrics |= {f"{label}/{name}": value for name, value in part.task.learn(rates_of_part).items()}
        return metrics

    def state_dict(self) -> State:
        """Return the states of the tasks, by label."""
        return {label: part.task.state_dict() for label, part in self._parts.items()}

    def load_state_dict(self, state: State) -> None:
        """Restore the states of the tasks."""
        for label, part in self._parts.items():
            part.task.load_state_dict(state.get(label, {}))

    def spans(self, problem: Problem, text: str) -> Mapping[str, Sequence[tuple[int, int]]]:
        """Return the spans that the problem's task finds in a text."""
        return self._parts[problem.environment].task.spans(problem, text)


def _labelled(label: str, problem: Problem) -> Problem:
    # Two tasks may have problems of the same id.
    return replace(problem, id=f"{label}/{problem.id}", environment=label)
