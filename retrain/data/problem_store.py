"""Many problems in little memory."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from retrain.functional.seeds import digest_of
from retrain.types import Problem


class ProblemStore(Sequence[Problem]):
    """Problems as concatenated bytes; reading one parses it again.

    Attributes:
        hashes: `hash_key` of each.
    """

    def __init__(self) -> None:
        self.hashes = array("Q")
        self._bytes, self._ends, self._order = bytearray(), array("Q", [0]), array("L")

    def append(self, problem: Problem, key: int) -> None:
        """Append a problem whose `hash_key` is `key`."""
        fields = tuple(getattr(problem, name) for name in Problem.__slots__)
        self._bytes += pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)
        self.hashes.append(key)
        self._order.append(len(self._ends) - 1)
        self._ends.append(len(self._bytes))

    def split(self, fraction: float) -> tuple[ProblemStore, ProblemStore]:
        """(training, held-out): the prompt's hash decides, so equal prompts end on one side, whatever the seed."""
        limit, places = fraction * 2**64, range(len(self))
        train = self._picked(place for place in places if self.hashes[place] >= limit)
        return train, self._picked(place for place in places if self.hashes[place] < limit)

    def in_hash_order(self) -> ProblemStore:
        """Sorted by the prompt's hash: the first few are a fair sample of all, and the same in every run."""
        return self._picked(sorted(range(len(self)), key=self.hashes.__getitem__))

    def _picked(self, places: Iterable[int]) -> ProblemStore:
        """Return the problems at these places, in this order. Bytes are shared, so append to neither afterwards."""
        some = ProblemStore()
        some._bytes, some._ends = self._bytes, self._ends
        for place in places:
            some._order.append(self._order[place])
            some.hashes.append(self.hashes[place])
        return some

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = self._order[index]
        return Problem(*pickle.loads(memoryview(self._bytes)[self._ends[place] : self._ends[place + 1]]))  # noqa: S301 - own

    def __len__(self) -> int:
        return len(self._order)


def prompt_hash(problem: Problem) -> str:
    """sha256 of the prompt, in hex."""
    return digest_of(problem.prompt)


def hash_key(problem: Problem) -> int:
    """The first 64 bits of the prompt's hash."""
    return int(prompt_hash(problem)[:16], 16)
