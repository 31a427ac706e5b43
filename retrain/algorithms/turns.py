"""Credit for each turn of an episode in an environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from retrain import functional as F
from retrain.registry import transform

if TYPE_CHECKING:
    from torch import Tensor

Discount = Annotated[float, Field(ge=0, le=1)]


@transform("turn_returns")
def turn_returns(
    turn_rewards: Tensor, turn_ids: Tensor, response_mask: Tensor, group_ids: Tensor, *, gamma: Discount = 1.0
) -> Tensor:
    """Return from each turn on, minus the mean return of the group's other episodes from that turn on.

    A_{i,k} = sum_{j>=k} gamma^(j-k) * r_{i,j} - b_{i,k},  b_{i,k} = mean over the others of their return from turn k

    It replaces the advantages before it. The baseline does not depend on the actions of episode i from turn k on, so
    the gradient estimate is unbiased. For episodes of one turn it is RLOO.

    Args:
        turn_rewards: [N, T], on the last token of each turn; turn_ids: [N, T] int, from 0; response_mask: [N, T] bool;
            group_ids: [N] int.
        gamma: discount, per turn.
    Returns:
        [N, T], equal on all tokens of a turn. If no other episode reached turn k, the baseline is 0.
    References: Ahmadian et al., Back to Basics (RLOO), arXiv:2402.14740 (for one turn; this project extends it).
    """
    rewards, reached = _by_turn(turn_rewards, turn_ids)
    returns = F.returns.discounted_sum(rewards, gamma)
    credit = returns.clone()
    for turn in range(returns.shape[1]):
        members = reached[:, turn]
        compared = F.groups.leave_one_out(returns[:, turn], group_ids, members)
        # Leave-one-out gives 0 without others; the return itself is unbiased, too, and says more.
        is_single = F.groups.group_size(group_ids, members) < 2
        credit[:, turn] = returns[:, turn].where(is_single, compared)
    return F.masked.keep(credit.gather(1, turn_ids), response_mask)


@transform("turn_grpo")
def turn_grpo(
    turn_rewards: Tensor, turn_ids: Tensor, response_mask: Tensor, group_ids: Tensor, *, gamma: Discount = 1.0
) -> Tensor:
    """Rewards of each turn relative to the group's mean reward of the turn with the same number.

    A_{i,k} = sum_{j>=k} gamma^(j-k) * (r_{i,j} - m_j),  m_j = mean of r_j over the group's episodes that reached turn j

    It replaces the advantages before it, and is meant for comparison. It is biased if the policy decides on the number
    of turns: an episode that continues is compared only with those that continued, so the value of continuing cancels.
    `turn_returns` does not have this bias.

    Args:
        turn_rewards: [N, T], on the last token of each turn; turn_ids: [N, T] int, from 0; response_mask: [N, T] bool;
            group_ids: [N] int.
        gamma: discount, per turn.
    Returns:
        [N, T], equal on all tokens of a turn.
    References: Zeng et al., Reinforcing Multi-Turn Reasoning in LLM Agents, arXiv:2505.11821.
    """
    rewards, reached = _by_turn(turn_rewards, turn_ids)
    for turn in range(rewards.shape[1]):
        members = reached[:, turn]
        mean = F.groups.group_mean(rewards[:, turn], group_ids, members)
        # 0 for an episode that ended before: its reward of that turn does not exist.
        rewards[:, turn] = (rewards[:, turn] - mean).where(members, 0.0)
    return F.masked.keep(F.returns.discounted_sum(rewards, gamma).gather(1, turn_ids), response_mask)


@transform("gigpo")
def gigpo(  # noqa: PLR0913 - six columns and four keys
    advantages: Tensor,
    turn_rewards: Tensor,
    turn_ids: Tensor,
    anchor_ids: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    omega: Annotated[float, Field(ge=0)] = 1.0,
    gamma: Discount = 0.95,
    norm: Literal["mean", "mean_std"] = "mean",
    eps: Annotated[float, Field(gt=0)] = 1e-6,
) -> tuple[Tensor, dict[str, float]]:
    """Add the return of each turn relative to the group's turns that began in the same state of the environment.

    A_t + omega * (R_ik - mean R) [/ (sd R + eps)],  R_ik = sum_{j>=k} gamma^(j-k) * r_ij

    Mean and sample standard deviation are over all turns of the group that began in the state of turn k, including
    repeated visits of one episode. A_t is the run's own advantage. If the episodes of a group begin in the same state,
    the addition to their first turn is a second group advantage.

    Args:
        advantages: [N, T]; turn_rewards: [N, T], on the last token of each turn; turn_ids: [N, T] int, from 0;
            anchor_ids: [N, T] int, the state before the token's turn, -1 where turns are not compared;
            response_mask: [N, T] bool; group_ids: [N] int.
        omega: weight of the addition.
        gamma: discount, per turn.
        norm: "mean" subtracts the mean, "mean_std" also divides by the standard deviation.
        eps: added to the standard deviation.
    Returns:
        [N, T], with an equal addition on all tokens of a turn, 0 for a state that occurs once; and gigpo/shared, the
        share of turns whose state occurs more than once.
    References: Feng et al., Group-in-Group Policy Optimization, arXiv:2505.10978.
    """
    import torch

    # Entries of `turn_ids` outside the mask are arbitrary.
    ids = turn_ids.masked_fill(~response_mask, 0)
    rewards, _ = _by_turn(F.masked.keep(turn_rewards, response_mask), ids)
    shape, absent = rewards.shape, torch.full(rewards.shape, -1, device=ids.device)
    anchors = absent.scatter_reduce(1, ids, anchor_ids.masked_fill(~response_mask, -1), "amax")
    compared = (anchors >= 0).flatten()
    # The same state in another group is another state: its problem differs.
    pairs = torch.stack([group_ids[:, None].expand(shape), anchors], -1).flatten(0, 1)
    states = torch.unique(pairs, dim=0, return_inverse=True)[1]
    returns = F.returns.discounted_sum(rewards, gamma).flatten()
    shared = compared & (F.groups.group_size(states, compared) > 1)
    credit = returns - F.groups.group_mean(returns, states, compared)
    if norm == "mean_std":
        spread = F.groups.group_std(returns, states, compared, ddof=1)
        credit = (credit / (spread + eps)).where(spread > 0, 0.0)
    added = credit.where(shared, 0.0).view(shape).gather(1, ids)
    share = float(shared.sum() / compared.sum().clamp(min=1))
    return advantages + omega * F.masked.keep(added, response_mask), {"gigpo/shared": share}


def _by_turn(turn_rewards: Tensor, turn_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rewards [N, K] of the turns, and [N, K] bool, True for turns that the episode reached."""
    last = turn_ids.amax(-1, keepdim=True)
    # Rewards are 0 except at the last token of a turn, so the sum over its tokens is its reward.
    rewards = turn_rewards.new_zeros(len(turn_ids), int(last.max()) + 1).scatter_add(1, turn_ids, turn_rewards)
    # 0, 1, 2, ... in every row, on the same device.
    numbers = turn_ids.new_ones(rewards.shape).cumsum(-1) - 1
    return rewards, numbers <= last
