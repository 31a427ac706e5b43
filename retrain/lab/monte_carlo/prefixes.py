"""Prefixes of completions, their values, and the credit of the segments between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.types import Prefix

if TYPE_CHECKING:
    from torch import Tensor


def prefixes(
    input_ids: Tensor, response_mask: Tensor, group_ids: Tensor, starts: Tensor
) -> tuple[list[Prefix], Tensor]:
    """Find the distinct contexts of the marked tokens.

    Args:
        starts: [N, T] bool, response tokens.
    Returns:
        The prefixes, and for every marked token, in row-major order, the index of its prefix.
    """
    ids, groups = input_ids.tolist(), group_ids.tolist()
    before: list[list[int]] = (response_mask.cumsum(-1) - response_mask.long()).tolist()
    known: dict[Prefix, int] = {}
    places: list[list[int]] = starts.nonzero().tolist()
    found = [known.setdefault(Prefix(groups[n], tuple(ids[n][:t]), before[n][t]), len(known)) for n, t in places]
    return list(known), group_ids.new_tensor(found).long()


def values_at(starts: Tensor, rewards: Tensor, numbers: Tensor) -> Tensor:
    """Return [N, T]: mean reward [P, K] of each marked token's prefix; 0 elsewhere, or if all scoring failed."""
    values = starts.new_zeros(starts.shape).float()
    values[starts] = rewards.nanmean(-1).nan_to_num(0.0).to(values)[numbers]
    return values


def credit(values: Tensor, starts: Tensor, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Assign each token of a segment the value after the segment minus the value before it.

    A_t = V(start of the next segment, or the reward after the last) - V(start of its segment)

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
