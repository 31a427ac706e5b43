"""Advantage with the reward of the prompt's greedy completion as baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.registry import advantage

if TYPE_CHECKING:
    from torch import Tensor


@advantage("remax")
def remax(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Reward minus the reward of greedy decoding.

    A_i = r_i - r_greedy

    The run samples an additional completion of every prompt at temperature 0, scores it with the same rewards, and does
    not train on it. The baseline does not depend on the other completions, so `[training] group_size = 1` is possible.
    A prompt whose greedy completion has no reward is left out.

    Args:
        rewards: [N] float, any unit; greedy_rewards: [N], of the prompt's greedy completion, repeated on its rows.
    Returns:
        [N] in the unit of the reward.
    References: Li et al., ReMax, arXiv:2310.10505.
    """
    return rewards - greedy_rewards
