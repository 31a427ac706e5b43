"""Tasks that draw problems one by one, and measurements of their premise."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from retrain.functional.seeds import derive_seed
from retrain.protocols import Task
from retrain.types import Problem, Rollout

_HELDOUT_SHARE = 8
"""One problem in this many is held out."""

CharSpan = tuple[int, int]
"""(first, behind the last) character of a completion's text."""

SHORT: Mapping[str, Any] = {"training": {"max_steps": 60}, "eval": {"every": 20, "problems": 512}}
"""Trait `settings` of a task that a run of less than a minute of CPU learns."""


class Drawn(Task):
    """Problems drawn one by one; a hash of the prompt decides which are held out, whatever the seed.

    Args:
        seed: of the training problems and of every demonstration.
        settings: further settings that determine the problems, for `fingerprint`.
    """

    def __init__(self, seed: int, **settings: float) -> None:
        self.seed, self.settings = seed, settings

    @abstractmethod
    def _problem(self, rng: Random) -> Problem:
        """A problem with a demonstration."""

    def problem(self, index: int) -> Problem:
        """Training problem number `index`; it derives from (seed, index) alone."""
        rng = Random(derive_seed(self.seed, "train", index))
        while _heldout(found := self._problem(rng)):
            pass
        return found

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` distinct held-out problems, fewer if there are fewer."""
        found: dict[str, Problem] = {}
        for draw in range(1000 + 20 * count):
            if len(found) >= count:
                break
            problem = self._problem(Random(derive_seed(0, "heldout", draw)))
            if _heldout(problem):
                found.setdefault(problem.id, problem)
        return list(found.values())

    def fingerprint(self) -> str:
        """Hash of everything that determines the problems, except the seed."""
        settings = {"task": type(self).__name__, **self.settings}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _heldout(problem: Problem) -> bool:
    return hashlib.sha256(problem.id.encode()).digest()[0] % _HELDOUT_SHARE == 0


def answered(problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> list[tuple[Problem, Rollout]]:
    """Every answer with its problem."""
    return [(problem, answer) for problem, group in zip(problems, answers, strict=True) for answer in group]


def explained(answers: Sequence[tuple[str, str, float]]) -> float:
    r"""Share of the outcome's variance that a choice explains, among problems of one kind: unbiased epsilon squared.

    (SSB - d * MSW) / SST, with the sums of squares between and within choices of each kind of problem, their mean
    square within MSW, and d the choices less one, summed over kinds. 0 where outcomes do not vary.

    Args:
        answers: (kind of problem, choice, outcome) of every answer.
    References: Kelley, An Unbiased Correlation Ratio Measure (1935).
    """
    cells: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for kind, choice, outcome in answers:
        cells[kind][choice].append(outcome)
    within = total = 0.0
    freedom = left = 0
    for choices in cells.values():
        every = [outcome for found in choices.values() for outcome in found]
        total += _squares(every)
        within += sum(map(_squares, choices.values()))
        freedom, left = freedom + len(choices) - 1, left + len(every) - len(choices)
    return (total - within - freedom * within / left) / total if total and left else 0.0


def _squares(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values)
