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
        input_ids: [N, T] int64.
        response_mask: [N, T] bool.
        group_ids: [N] int64.
        starts: [N, T] bool, marks response tokens.
    Returns:
        The prefixes, and for every marked token, in row-major order, the index of its prefix.
    """
    ids, groups = input_ids.tolist(), group_ids.tolist()
    # Response tokens before each position, which a continuation has used of the run's limit.
    before: list[list[int]] = (response_mask.cumsum(-1) - response_mask.long()).tolist()
    indices: dict[Prefix, int] = {}
    places: list[list[int]] = starts.nonzero().tolist()
    prefixes_at = [
        # Completions of a group begin alike, so that many prefixes are sampled from once.
        indices.setdefault(Prefix(groups[n], tuple(ids[n][:t]), before[n][t]), len(indices))
        for n, t in places
    ]
    return list(indices), group_ids.new_tensor(prefixes_at).long()


def values_at(starts: Tensor, rewards: Tensor, numbers: Tensor) -> Tensor:
    """Value of each marked token's prefix: the mean reward of its continuations.

    Args:
        starts: [N, T] bool, marks M tokens.
        rewards: [P, K], rewards of K continuations of P prefixes; NaN where scoring failed.
        numbers: [M] int64, index of each marked token's prefix.
    Returns:
        [N, T] in the unit of the reward; 0 for other tokens, and where the scoring of all continuations failed.
    """
    values = starts.new_zeros(starts.shape).float()
    # A failed reward is left out of the mean; only a prefix of which all failed has no value.
    values[starts] = rewards.nanmean(-1).nan_to_num(0.0).to(values)[numbers]
    return values


def credit(values: Tensor, starts: Tensor, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Assign each token of a segment the value after the segment minus the value before it.

    A_t = V(start of the next segment, or the reward after the last) - V(start of its segment)

    Args:
        values: [N, T], value of the prefix before a token; read where `starts` is True.
        starts: [N, T] bool, first tokens of segments, which include a row's first response token.
        rewards: [N], value of the whole completion.
        response_mask: [N, T] bool.
    Returns:
        [N, T], 0 outside `response_mask`. Over the segments of a row it sums to the reward minus the prompt's value.
    """
    behind, returns = rewards.to(values.dtype), values.new_zeros(values.shape)
    # From the end: the value after a segment is that at the start of the next.
    for column in reversed(range(values.shape[1])):
        returns[:, column] = behind
        behind = values[:, column].where(starts[:, column], behind)
    before = rewards.new_zeros(rewards.shape).to(values.dtype)
    for column in range(values.shape[1]):
        before = values[:, column].where(starts[:, column], before)
        returns[:, column] -= before
    return returns.where(response_mask, 0.0)
