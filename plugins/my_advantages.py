"""Episode advantages as plain functions: the rewards of one group in, one advantage per completion out.

advantage_mode = "plugins.my_advantages.hipa_like_advantages"
"""

from __future__ import annotations


def hipa_like_advantages(rewards: list[float]) -> list[float]:
    """A_i = 2 (r_i - mean r): twice the centered reward; a group that agrees gives zeros."""
    if not rewards:
        return []
    mean = sum(rewards) / len(rewards)
    return [2.0 * (reward - mean) for reward in rewards]


def asymmetric_advantages(rewards: list[float], params: dict[str, float]) -> list[float]:
    """A_i = scale (r_i - mean r), times `penalty` below the mean: failures count less than successes.

    `params` is the table `[algorithm.advantage_params]`.
    """
    scale, penalty = params.get("scale", 1.0), params.get("penalty", 0.5)
    mean = sum(rewards) / max(len(rewards), 1)
    return [scale * (reward - mean) * (1.0 if reward >= mean else penalty) for reward in rewards]
