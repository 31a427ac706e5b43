"""Advantages with other scales or weights of rewards than the group's standard deviation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from retrain import functional as F
from retrain.algorithms.advantages.group_baselines import grpo
from retrain.registry import advantage

if TYPE_CHECKING:
    from torch import Tensor

DegreesLost = Annotated[int, Field(ge=0, le=1)]
Epsilon = Annotated[float, Field(gt=0)]


@advantage("opo")
def opo(rewards: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus the group's mean reward weighted by length.

    A_i = r_i - (sum_j l_j r_j) / (sum_j l_j) over the group; the plain mean if all l_j are 0

    The weighted mean is the baseline with the lowest variance if the squared gradient of a completion is proportional
    to its length. The paper trains with one update per batch, without a KL term and without an entropy bonus.

    Args:
        rewards: [N] float, any unit; lengths: [N] int, response tokens; group_ids: [N] int.
    Returns:
        [N] in the unit of the reward; 0 in a group of one, and of equal rewards.
    References: Hao et al., On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.
    """
    weights = lengths.to(rewards.dtype)
    total = F.groups.group_sum(weights, group_ids)
    # Relative to the plain mean, so that the result is exactly 0 in a group of equal rewards.
    centred = grpo(rewards, group_ids)
    shift = F.groups.group_sum(weights * centred, group_ids) / total.clamp(min=1)
    return centred - shift


@advantage("lite_ppo")
def lite_ppo(rewards: Tensor, group_ids: Tensor, *, ddof: DegreesLost = 1, eps: Epsilon = 1e-4) -> Tensor:
    """Group advantage divided by the standard deviation of the whole batch.

    A_i = (r_i - mean_g r) / (sd_batch r + eps)

    Use it instead of `grpo_std` if reward scales differ between tasks but not within a batch. The standard deviation
    is that of the rewards of all rows that are trained on, so resampling of groups changes it.

    Args:
        rewards: [N] float, any unit; group_ids: [N] int.
        ddof: 0 for the population standard deviation, 1 for the sample standard deviation.
        eps: added to the standard deviation.
    Returns:
        [N] without unit; 0 in groups of equal rewards, and in a batch of equal rewards.
    References: Liu et al., Tricks or Traps (Lite PPO), arXiv:2508.08221.
    """
    # One group for the whole batch.
    spread = F.groups.group_std(rewards, group_ids * 0, ddof=ddof)
    return (grpo(rewards, group_ids) / (spread + eps)).where(spread > 0, 0.0)


@advantage("gdpo", least_rewards=2)
def gdpo(
    reward_parts: Tensor,
    reward_weights: Sequence[float],
    group_ids: Tensor,
    *,
    ddof: DegreesLost = 1,
    eps: Epsilon = 1e-4,
    batch_norm: bool = True,
) -> Tensor:
    """Weighted sum of rewards that are each normalised within the group.

    a_ik = (r_ik - mean_g r_k) / (sd_g r_k + eps);  S_i = sum_k w_k a_ik;  A_i = S_i / (sd S + eps)

    a_ik is 0 where the group's rewards are equal, where fewer than two rows of the group have
    reward k, and where row i does not have it. The batch mean of S is 0 by construction and is not
    subtracted, because rounding would give an advantage to groups of equal rewards.

    Args:
        reward_parts: [N, R] float, one column per `[[rewards]]` entry, or per part of its score, before
            its weight, NaN where a reward does not apply; reward_weights: R floats; group_ids: [N] int.
        ddof: of both deviations: 0 for the population's, 1 for the sample's.
        eps: added to both deviations.
        batch_norm: divide by the deviation of S over the rows that have a reward.
    Returns:
        [N] without unit.
    References: Liu et al., GDPO, arXiv:2601.05242.
    """
    is_given = ~reward_parts.isnan()
    total = reward_parts.new_zeros(len(reward_parts))
    for part, has, weight in zip(reward_parts.T, is_given.T, reward_weights, strict=True):
        values = part.where(has, 0.0)  # NaN would spread to the whole group
        spread = F.groups.group_std(values, group_ids, has, ddof=ddof)
        centred = values - F.groups.group_mean(values, group_ids, has)
        # A single value has nothing to be compared with, and equal values differ by rounding at most.
        compared = has & (F.groups.group_size(group_ids, has) > 1) & (spread > 0)
        total = total + weight * (centred / (spread + eps)).where(compared, 0.0)
    if not batch_norm:
        return total
    spread = F.groups.group_std(total, group_ids * 0, is_given.any(-1), ddof=ddof)
    return (total / (spread + eps)).where(spread > 0, 0.0)
