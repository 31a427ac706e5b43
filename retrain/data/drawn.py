"""Base class of tasks that generate random problems."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from retrain.functional.seeds import derive_seed, is_heldout
from retrain.protocols import Task
from retrain.types import Problem, Rollout

CharSpan = tuple[int, int]
"""(start, end) of a span of a completion's text in characters, end exclusive."""

SHORT: Mapping[str, Any] = {"training": {"max_steps": 60}, "eval": {"every": 20, "problems": 512}}
"""Trait `settings` of tasks whose runs take less than a minute of CPU time."""


class Drawn(Task):
    """Base class of tasks that generate random problems.

    A hash of a problem's id decides whether it is held out, independently of the seed.

    Args:
        seed: seed of the training problems and of their demonstrations.
        settings: further settings that determine the problems; they are part of `fingerprint`.
    """

    def __init__(self, seed: int, **settings: float) -> None:
        self.seed, self.settings = seed, settings

    @abstractmethod
    def _problem(self, rng: Random) -> Problem:
        """Generate a problem with a demonstration."""

    def problem(self, index: int) -> Problem:
        """Return training problem number `index`. It depends only on the seed, the settings and the index."""
        rng = Random(derive_seed(self.seed, "train", index))
        while is_heldout((problem := self._problem(rng)).id):
            pass
        return problem

    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` distinct held-out problems; fewer if there are fewer."""
        problems: dict[str, Problem] = {}
        # Eight draws per held-out problem on average. A task with few problems ends the search without enough.
        for draw in range(1000 + 20 * count):
            if len(problems) >= count:
                break
            # Seed 0 for every run, so that all runs are evaluated on the same problems.
            problem = self._problem(Random(derive_seed(0, "heldout", draw)))
            if is_heldout(problem.id):
                problems.setdefault(problem.id, problem)
        return list(problems.values())

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the problems, except the seed."""
        settings = {"task": type(self).__name__, **self.settings}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def answered(problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> list[tuple[Problem, Rollout]]:
    """Return pairs of a problem and one of its answers, for every answer.

    Args:
        problems: the problems.
        answers: the answers to each problem.
    """
    return [(problem, answer) for problem, group in zip(problems, answers, strict=True) for answer in group]
