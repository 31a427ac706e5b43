"""Statistics of prompt groups of any sizes, with rows in any order and without a Python loop over groups."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

ROUNDING = 1e-6
"""Relative size below which a float32 difference is rounding: eight times the spacing of float32, 1.2e-7."""


def group_sum(values: Float[Tensor, " N"], group_ids: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """Sum over each row's group, repeated for every member."""
    index, count = _index(group_ids)
    return values.new_zeros(count).index_add(0, index, values)[index]


def group_size(group_ids: Int[Tensor, " N"], members: Bool[Tensor, " N"] | None = None) -> Int[Tensor, " N"]:
    """Number of rows in each row's group, or of its rows in `members`, repeated for every row of the group."""
    counted = torch.ones_like(group_ids) if members is None else members.to(group_ids.dtype)
    index, count = _index(group_ids)
    return counted.new_zeros(count).index_add(0, index, counted)[index]


def group_mean(
    values: Float[Tensor, " N"], group_ids: Int[Tensor, " N"], members: Bool[Tensor, " N"] | None = None
) -> Float[Tensor, " N"]:
    """Mean over each row's group, or over its rows in `members`, repeated for every row of the group.

    The mean is computed relative to the group's minimum. So the mean of equal values is exactly this value in every
    precision, and such a group gets advantages that are exactly 0. A group without members gets 0.
    """
    if members is None:
        members = torch.ones_like(group_ids, dtype=torch.bool)
    index, count = _index(group_ids)
    # Rows outside `members` must not be the minimum. A group without members keeps infinity, which becomes 0.
    outside = values.masked_fill(~members, torch.inf)
    lowest = values.new_full((count,), torch.inf).scatter_reduce(0, index, outside, "amin")
    lowest = lowest.where(lowest.isfinite(), 0.0)[index]
    above = group_sum((values - lowest).where(members, 0.0), group_ids)
    return lowest + above / group_size(group_ids, members).clamp(min=1)


def group_std(
    values: Float[Tensor, " N"], group_ids: Int[Tensor, " N"], members: Bool[Tensor, " N"] | None = None, ddof: int = 0
) -> Float[Tensor, " N"]:
    """Standard deviation over each row's group, or over its rows in `members`, repeated for every row of the group.

    It is 0 for a group with at most `ddof` members, and for values that differ by no more than rounding: divided by the
    deviation, their differences would be as large as any others.
    """
    mean = group_mean(values, group_ids, members)
    centered = values - mean
    if members is not None:
        centered = centered.where(members, 0.0)
    # Below, the clamp avoids 0 / 0; groups that it changes are set to 0.
    degrees = group_size(group_ids, members) - ddof
    variance = group_sum(centered.square(), group_ids) / degrees.clamp(min=1)
    deviation = variance.where(degrees > 0, 0.0).sqrt()
    return deviation.where(deviation > ROUNDING * mean.abs(), 0.0)


def leave_one_out(
    values: Float[Tensor, " N"], group_ids: Int[Tensor, " N"], members: Bool[Tensor, " N"] | None = None
) -> Float[Tensor, " N"]:
    """Value minus the mean of the group's other members: n/(n-1) * (value - mean); 0 if n is 1.

    Rows outside `members` get meaningless values, which the caller must mask.
    """
    n = group_size(group_ids, members).to(values.dtype)
    # The factor n/(n-1) leaves the row itself out without a second pass over the group.
    return (values - group_mean(values, group_ids, members)) * n / (n - 1).clamp(min=1)


def has_credit(
    advantages: Float[Tensor, "N T"], rewards: Float[Tensor, " N"], group_ids: Int[Tensor, " N"]
) -> Bool[Tensor, " N"]:
    """Return True for the rows of groups whose advantages are more than rounding.

        max |A| > 1e-6 * max(largest |A| of the batch, largest |r| of the group if its rewards are equal)

    An advantage that computes a mean itself may miss it by rounding: eight equal rewards of .2 leave advantages of
    1e-8. An optimizer that normalizes its steps would follow them like advantages of 1.

    Args:
        advantages: [N, T], 0 outside of responses; rewards: [N], any unit; group_ids: [N].
    """
    index, count = _index(group_ids)

    def largest(values: Tensor) -> Tensor:
        return values.new_zeros(count).scatter_reduce(0, index, values, "amax", include_self=False)

    sizes = largest(advantages.abs().amax(-1))
    scale = largest(rewards.abs())
    # The largest negated reward is minus the smallest reward.
    equal = largest(rewards) + largest(-rewards) <= ROUNDING * scale
    # Unequal rewards have no scale: 1000 and 1001 differ by little, and still deserve credit.
    noise = ROUNDING * torch.where(equal, torch.maximum(scale, sizes.max()), sizes.max())
    return (sizes > noise)[index]


def _index(group_ids: Int[Tensor, " N"]) -> tuple[Int[Tensor, " N"], int]:
    """Return the groups renumbered as 0..count-1, and their count."""
    # Ids of groups have gaps and may be large; index_add needs 0..count-1.
    unique, index = torch.unique(group_ids, return_inverse=True)
    return index, len(unique)
