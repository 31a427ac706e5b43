"""A reward with the settings of its entry in `[[rewards]]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from retrain.registry import Component, reward


class Entry(NamedTuple):
    """A reward of the pool.

    Attributes:
        bound: the reward.
        weight: its weight in the sum; a reward of weight 0 is only recorded.
        timeout_s: time limit of one call in seconds; a call may score a whole batch. None uses that of the pool.
        concurrency: number of completions, or of groups, that a coroutine function scores concurrently.
    """

    bound: Component
    weight: float
    timeout_s: float | None = None
    concurrency: int = 16

    def seconds(self, pool: float) -> float:
        """Return the time limit of a call: the entry's, else the trait `timeout_s`, else the pool's."""
        return self.timeout_s or reward.traits_of(self.bound).timeout_s or pool


def unique_names(names: Sequence[str]) -> list[str]:
    """Return the names with repeated ones numbered: exact, exact_2."""
    unique: list[str] = []
    for index, name in enumerate(names):
        count = names[:index].count(name)
        label = f"{name}_{count + 1}" if count else name
        # A reward may be registered under the name that a repeated one would get.
        unique.append(label if label not in unique else f"{label}_{index + 1}")
    return unique
