"""Beginnings of completions, what they are worth, and the credit of what leads from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Prefix(NamedTuple):
    """What a completion is continued from.

    Attributes:
        group: whose prompt it begins with.
        ids: the prompt and the response so far.
        sampled: how many of them are the response.
    """

    group: int
    ids: tuple[int, ...]
    sampled: int


Continue = Callable[[Mapping[int, Any], Sequence[Prefix], int, int], "tuple[Tensor, int]"]
"""(problems, prefixes, continuations of each, seed) -> rewards [prefixes, continuations], NaN where scoring failed, and
the number of tokens sampled. A run's components may be built with it under the name `continue_from`."""


def prefixes(
    input_ids: Tensor, response_mask: Tensor, group_ids: Tensor, starts: Tensor
) -> tuple[list[Prefix], Tensor]:
    """The different contexts of some tokens.

    Args:
        starts: [N, T] bool, response tokens.
    Returns:
        The prefixes, and for every marked token in row-major order the number of the one before it.
    """
    ids, groups = input_ids.tolist(), group_ids.tolist()
    before: list[list[int]] = (response_mask.cumsum(-1) - response_mask.long()).tolist()
    known: dict[Prefix, int] = {}
    places: list[list[int]] = starts.nonzero().tolist()
    found = [known.setdefault(Prefix(groups[n], tuple(ids[n][:t]), before[n][t]), len(known)) for n, t in places]
    return list(known), group_ids.new_tensor(found).long()


def values_at(starts: Tensor, rewards: Tensor, numbers: Tensor) -> Tensor:
    """[N, T]: mean reward [P, K] of the prefix before every marked token, 0 elsewhere and where all scoring failed."""
    values = starts.new_zeros(starts.shape).float()
    values[starts] = rewards.nanmean(-1).nan_to_num(0.0).to(values)[numbers]
    return values


def credit(values: Tensor, starts: Tensor, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Value behind a segment less the value before it, on all of the segment's tokens.

    A_t = V(next segment's start, or the reward behind the last) - V(own segment's start)

    Args:
        values: [N, T], read where `starts` [N, T] bool is true: on a row's first response token at the least.
        rewards: [N], the value of the whole completion.
    Returns:
        [N, T], 0 outside `response_mask`. Over the segments of a row it sums to the reward less the prompt's value.
    """
    behind, found = rewards.to(values.dtype), values.new_zeros(values.shape)
    for column in reversed(range(values.shape[1])):
        found[:, column] = behind
        behind = values[:, column].where(starts[:, column], behind)
    before = rewards.new_zeros(rewards.shape).to(values.dtype)
    for column in range(values.shape[1]):
        before = values[:, column].where(starts[:, column], before)
        found[:, column] -= before
    return found.where(response_mask, 0.0)
