"""Credit for every turn of an episode in an environment."""

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
    turn_rewards: Tensor,
    turn_ids: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    gamma: Discount = 1.0,
    among: Literal["reached", "all"] = "reached",
) -> Tensor:
    """What a turn and the turns after it earned, less the mean of what the group's other episodes earned from there.

    A_{i,k} = sum_{j>=k} gamma^(j-k) * r_{i,j} - b_{i,k},  b_{i,k} = mean over the others of their return from turn k

    It takes the place of the episode's advantages. The baseline does not depend on what episode i does from turn k on,
    so the gradient is that of the expected return, without bias. For episodes of one turn it is RLOO.

    Args:
        turn_rewards: [N, T], on the last token of each turn; turn_ids: [N, T] int, from 0; response_mask: [N, T] bool;
            group_ids: [N] int.
        gamma: discount, per turn.
        among: the others whose mean is taken: those that "reached" turn k, or "all", of which the ended earn 0.
    Returns:
        [N, T], the same on all tokens of a turn. Where no other episode has reached turn k the baseline is 0.
    References: Ahmadian et al., Back to Basics (RLOO), arXiv:2402.14740 (one turn; per turn it is this project's own).
    """
    rewards, reached = _by_turn(turn_rewards, turn_ids)
    returns = _to_come(rewards, gamma)
    credit = returns.clone()
    for turn in range(returns.shape[1]):
        members = reached[:, turn] if among == "reached" else reached[:, 0]
        compared = F.groups.leave_one_out(returns[:, turn], group_ids, members)
        alone = F.groups.group_size(group_ids, members) < 2
        credit[:, turn] = returns[:, turn].where(alone, compared)
    return F.masked.keep(credit.gather(1, turn_ids), response_mask)


@transform("turn_grpo")
def turn_grpo(
    turn_rewards: Tensor, turn_ids: Tensor, response_mask: Tensor, group_ids: Tensor, *, gamma: Discount = 1.0
) -> Tensor:
    """GRPO for each turn's number: biased wherever the policy decides how many turns there are. For comparison.

    A_{i,k} = sum_{j>=k} gamma^(j-k) * (r_{i,j} - m_j),  m_j = mean of r_j over the group's episodes that reached turn j

    It takes the place of the episode's advantages. An episode that goes on is compared with those that went on, never
    with those that stopped: what going on is worth cancels out. `turn_returns` has no such bias.

    Args:
        turn_rewards: [N, T], on the last token of each turn; turn_ids: [N, T] int, from 0; response_mask: [N, T] bool;
            group_ids: [N] int.
        gamma: discount, per turn.
    Returns:
        [N, T], the same on all tokens of a turn.
    References: Zeng et al., Reinforcing Multi-Turn Reasoning in LLM Agents, arXiv:2505.11821.
    """
    rewards, reached = _by_turn(turn_rewards, turn_ids)
    for turn in range(rewards.shape[1]):
        members = reached[:, turn]
        mean = F.groups.group_mean(rewards[:, turn], group_ids, members)
        rewards[:, turn] = (rewards[:, turn] - mean).where(members, 0.0)
    return F.masked.keep(_to_come(rewards, gamma).gather(1, turn_ids), response_mask)


def _by_turn(turn_rewards: Tensor, turn_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards [N, K] of the turns, and which of them an episode reached."""
    last = turn_ids.amax(-1, keepdim=True)
    rewards = turn_rewards.new_zeros(len(turn_ids), int(last.max()) + 1).scatter_add(1, turn_ids, turn_rewards)
    numbers = turn_ids.new_ones(rewards.shape).cumsum(-1) - 1
    return rewards, numbers <= last


def _to_come(rewards: Tensor, gamma: float) -> Tensor:
    """sum_{j>=k} gamma^(j-k) * r_j for every turn k."""
    found, total = rewards.clone(), rewards.new_zeros(len(rewards))
    for turn in reversed(range(rewards.shape[1])):
        total = found[:, turn] = rewards[:, turn] + gamma * total
    return found
