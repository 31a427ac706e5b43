"""Tasks whose problems are drawn one by one."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from random import Random

from retrain.functional.seeds import derive_seed
from retrain.protocols import Task
from retrain.types import Problem

_HELDOUT_SHARE = 8
"""One problem in this many is held out."""


class Drawn(Task):
    """Problems drawn one by one; whether one is held out is a hash of what it asks, whatever the seed.

    Args:
        seed: of the training problems and of every demonstration.
        settings: what else decides the problems, for `fingerprint`.
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
            problem = self._problem(Random(derive_seed(0, "heldout", draw)))
            if _heldout(problem) and len(found) < count:
                found.setdefault(problem.id, problem)
        return list(found.values())

    def fingerprint(self) -> str:
        """Hash of everything that decides what the problems are, the seed aside."""
        settings = {"task": type(self).__name__, **self.settings}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _heldout(problem: Problem) -> bool:
    return hashlib.sha256(problem.id.encode()).digest()[0] % _HELDOUT_SHARE == 0
