"""Episode advantages: one number per completion, from its reward and those of its group."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from retrain import functional as F
from retrain.registry import advantage

if TYPE_CHECKING:
    from torch import Tensor


@advantage("grpo")
def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Mean-centered group advantage, without a standard deviation.

    A_i = r_i - mean_{j in group(i)} r_j

    Args:
        rewards: [N] float, any unit; one per completion.
        group_ids: [N] int; rows of one prompt share an id.
    Returns:
        [N] in the unit of the reward; sums to 0 over every group; 0 in a group of one.
    References: Shao et al., DeepSeekMath, arXiv:2402.03300 (divided by the standard deviation); Liu et al., Dr. GRPO,
        arXiv:2503.20783 (without division).
    """
    return rewards - F.groups.group_mean(rewards, group_ids)


@advantage("grpo_std")
@advantage("vanilla", table="grpo_std")
def grpo_std(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    ddof: Annotated[int, Field(ge=0, le=1)] = 0,
    eps: Annotated[float, Field(gt=0)] = 1e-8,
) -> Tensor:
    """Group advantage divided by the group's standard deviation.

    A_i = (r_i - mean r) / (sd(r) + eps); 0 where sd < eps

    Args:
        rewards: [N] float; group_ids: [N] int.
        ddof: 0 for the population standard deviation, 1 for the sample standard deviation.
        eps: added to sd. Other trainers use ddof 1 with eps 1e-6 or 1e-4.
    Returns:
        [N] without unit; 0 in a group of equal rewards.
    References: Shao et al., DeepSeekMath, arXiv:2402.03300.
    """
    spread = F.groups.group_std(rewards, group_ids, ddof=ddof)
    # Equal rewards have no scale, and rounding divided by eps would be an advantage.
    return (grpo(rewards, group_ids) / (spread + eps)).where(spread >= eps, 0.0)


@advantage("maxrl")
def maxrl(rewards: Tensor, group_ids: Tensor, *, eps: Annotated[float, Field(gt=0)] = 1e-6) -> Tensor:
    """Group advantage divided by the group's success rate, which gives rare successes more weight.

    A_i = (r_i - mean r) / (mean r + eps); 0 where mean r <= eps

    Args:
        rewards: [N] float, intended to be non-negative; group_ids: [N] int.
        eps: added to the mean; a group whose mean is not above it gets advantage 0.
    Returns:
        [N] without unit, in [-1, G - 1] for rewards in {0, 1}.
    References: Tajwar et al., Maximum Likelihood Reinforcement Learning, arXiv:2602.02710.
    """
    mean = F.groups.group_mean(rewards, group_ids)
    # Without a success there is no rate to divide by; a negative mean would flip the signs.
    return ((rewards - mean) / (mean + eps)).where(mean > eps, 0.0)


@advantage("rloo")
def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Reward minus the mean reward of the prompt's other completions.

    A_i = r_i - mean_{j != i} r_j

    Args:
        rewards: [N] float; group_ids: [N] int.
    Returns:
        [N] in the unit of the reward, n/(n-1) times `grpo`; 0 in a group of one.
    References: Ahmadian et al., Back to Basics, arXiv:2402.14740.
    """
    return F.groups.leave_one_out(rewards, group_ids)


@advantage("reinforce_pp")
def reinforce_pp(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """REINFORCE++ with the group's mean as baseline; the transform `whiten` adds its batch normalization.

    A_i = r_i - mean_{j in group(i)} r_j, then (A - mean A) / sd(A) over all tokens of the batch by `whiten`

    Args:
        rewards: [N] float; group_ids: [N] int.
    Returns:
        [N] in the unit of the reward; add `whiten` to `transform_mode` to normalize it.
    References: Hu et al., REINFORCE++, arXiv:2501.03262.
    """
    return grpo(rewards, group_ids)


@advantage("grpo_lp")
def grpo_lp(
    rewards: Tensor,
    correct: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    max_tokens: int,
    *,
    gamma: Annotated[float, Field(ge=0)] = 1e-3,
) -> Tensor:
    """GRPO with a length penalty in the reward, the coupled form that `dca` is compared with.

    r'_i = r_i * (1 - gamma * l_i) if correct else 0, then A_i = (r'_i - mean r') / (sd(r') + 1e-8)

    Args:
        rewards: [N] float, 1 for a correct answer; correct: [N] bool; lengths: [N] tokens; group_ids: [N] int.
        max_tokens: limit of response tokens; if gamma * max_tokens > 1, a warning is given, because a long correct
            answer then has a lower reward than a wrong one.
        gamma: penalty per token.
    Returns:
        [N] without unit. In an all-correct group it does not depend on gamma.
    References: Arora and Zanette, Training Language Models to Reason Efficiently, arXiv:2502.04463.
    """
    # A warning and not an error: answers may stay far below the limit.
    if gamma * max_tokens > 1:
        warnings.warn(
            f"[grpo_lp] gamma {gamma} * max_tokens {max_tokens} > 1: a long correct answer scores below a wrong one; "
            f"use gamma <= {1 / max_tokens:.2g}",
            stacklevel=2,
        )
    penalized = (rewards * (1 - gamma * lengths.to(rewards.dtype))).where(correct, 0.0)
    return grpo_std(penalized, group_ids)
