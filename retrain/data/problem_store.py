"""Memory-efficient sequence of problems."""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Iterable, Sequence
from typing import overload

from retrain.functional.seeds import digest_of
from retrain.types import Problem


class ProblemStore(Sequence[Problem]):
    """Sequence of problems, stored as concatenated pickles. Every access unpickles a problem.

    Attributes:
        hashes: `hash_key` of each problem.
    """

    def __init__(self) -> None:
        self.hashes = array("Q")
        # Not a list of objects, each of which needs far more memory than its pickle.
        self._bytes, self._ends = bytearray(), array("Q", [0])
        self._order = array("L")

    def append(self, problem: Problem, key: int) -> None:
        """Append a problem whose `hash_key` is `key`."""
        # A tuple pickles without the names of the fields.
        fields = tuple(getattr(problem, name) for name in Problem.__slots__)
        self._bytes += pickle.dumps(fields, pickle.HIGHEST_PROTOCOL)
        self.hashes.append(key)
        self._order.append(len(self._ends) - 1)
        self._ends.append(len(self._bytes))

    def split(self, fraction: float) -> tuple[ProblemStore, ProblemStore]:
        """Split into training and held-out problems by the hash of the prompt, independently of the seed.

        Problems with equal prompts are on the same side.

        Args:
            fraction: share of the problems to hold out, in expectation.
        Returns:
            The training problems and the held-out problems.
        """
        # Hashes are uniform in [0, 2^64), so this share of them lies below the limit.
        limit, indices = fraction * 2**64, range(len(self))
        train = self._select(index for index in indices if self.hashes[index] >= limit)
        return train, self._select(index for index in indices if self.hashes[index] < limit)

    def in_hash_order(self) -> ProblemStore:
        """Return the problems sorted by the hash of the prompt.

        The first few are then an unbiased sample of all problems, and the same in every run.
        """
        return self._select(sorted(range(len(self)), key=self.hashes.__getitem__))

    def _select(self, indices: Iterable[int]) -> ProblemStore:
        """Return the problems at these indices, in this order.

        Both stores share their memory, so do not append to either of them afterwards.
        """
        selection = ProblemStore()
        selection._bytes, selection._ends = self._bytes, self._ends
        for index in indices:
            selection._order.append(self._order[index])
            selection.hashes.append(self.hashes[index])
        return selection

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        stored = self._order[index]
        pickled = memoryview(self._bytes)[self._ends[stored] : self._ends[stored + 1]]
        return Problem(*pickle.loads(pickled))  # noqa: S301 - pickled by this process

    def __len__(self) -> int:
        return len(self._order)


def prompt_hash(problem: Problem) -> str:
    """Return the SHA-256 hash of a problem's prompt, in hex."""
    return digest_of(problem.prompt)


def hash_key(problem: Problem) -> int:
    """Return the first 64 bits of the hash of a problem's prompt."""
    return int(prompt_hash(problem)[:16], 16)
