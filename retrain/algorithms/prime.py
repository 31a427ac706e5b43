"""PRIME: token rewards of an implicit process reward model, with the group's other completions as baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from retrain import functional as F
from retrain.registry import transform

if TYPE_CHECKING:
    from torch import Tensor


@transform("process_rloo", table="prime")
def process_rloo(  # noqa: PLR0913 - six columns and four keys
    advantages: Tensor,
    process_rewards: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    turn_ids: Tensor,
    step: int,
    *,
    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0,
    norm: Literal["batch", "none"] = "batch",
    delay: Annotated[int, Field(ge=0)] = 0,
    process_at: Literal["token", "turn"] = "token",
) -> Tensor:
    """Add the return of the process rewards, each less the mean process reward of the group's other completions.

    A_t + sum_{s>=t} gamma^(s-t) * [r_i^s - 1/(K-1) * sum_{j!=i} r_phi(y_j) / |y_j|],  r_phi(y) = sum_t r^t
    A_t  while step < delay

    Args:
        advantages: [N, T], of the episode; process_rewards: [N, T]; group_ids: [N] int; response_mask: [N, T] bool;
            turn_ids: [N, T] int, from 0; step: of the run, from 0.
        gamma: discount per response token, or per turn. Tokens that the policy did not sample are not counted.
        norm: "batch" first divides the process rewards by max |sum_{s>=t} r^s| + 1e-6 over the whole batch,
            which gives them the scale of a 0/1 outcome. "none" is the paper's formula.
        delay: number of steps at the start in which the reward model is trained and its rewards are not added. With
            norm = "batch" the noise of an untrained model would otherwise be as large as the outcome reward.
        process_at: "token", or "turn". With "turn", the process rewards of each turn are summed at its last token,
            |y_j| counts turns, and all tokens of a turn get the same value.
    Returns:
        [N, T]. K is the number of rows of the group that have response tokens. With K = 1 there is no baseline, and
        the row keeps its advantages. A `whiten` stage usually follows.
    References: Cui et al., Process Reinforcement through Implicit Rewards (PRIME), arXiv:2502.01456.
    """
    if step < delay:
        return advantages
    rewards = F.masked.keep(process_rewards, response_mask)
    times = response_mask
    if process_at == "turn":
        times = F.masked.turn_ends(response_mask, turn_ids)
        rewards = F.masked.keep(F.masked.turn_sum(rewards, response_mask, turn_ids), times)
    if norm == "batch":
        # One scale for the whole batch, so that process rewards of different groups stay comparable.
        rewards = rewards / (_to_come(rewards, times, 1.0).abs().amax() + 1e-6)
    mean = F.masked.row_mean(rewards, times)[:, 0]
    # A row without response tokens (truncated and masked) has no process reward to compare with.
    members = response_mask.any(-1)
    others = F.groups.group_size(group_ids, members) - 1
    baseline = (F.groups.group_sum(mean, group_ids) - mean) / others.clamp(min=1)
    excess = F.masked.keep(rewards - baseline[:, None], times & (others > 0)[:, None])
    return advantages + F.masked.keep(_to_come(excess, times, gamma), response_mask)


def _to_come(values: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return sum_{s>=t} gamma^(s-t) * v_s at every position. Only positions inside the mask count as time."""
    if gamma == 1:
        # Values outside the mask are 0 and time does not matter, so a sum from the right suffices.
        return values.flip(-1).cumsum(-1).flip(-1)
    total, returns = values.new_zeros(values.shape[:1]), values.new_zeros(values.shape)
    for column in reversed(range(values.shape[1])):
        total = (values[:, column] + gamma * total).where(mask[:, column], total)
        returns[:, column] = total
    return returns
