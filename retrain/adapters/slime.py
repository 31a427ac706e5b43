"""Adapter for slime: a reward post-processing function that computes advantages, and a custom reward.

--custom-reward-post-process-path retrain.adapters.slime.compute_advantage_for_slime
--custom-rm-path retrain.adapters.slime.reward_for_slime

Settings are attributes of slime's arguments, which `--custom-config-path` reads from a YAML file: retrain_mode,
retrain_params, retrain_reward and retrain_reward_params. slime's estimator "grpo" assigns the result of the
post-processing unchanged to every token of a sample.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from retrain.adapters.core import compute_advantage, score


def compute_advantage_for_slime(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Compute the advantages of a rollout, as slime's hook for reward post-processing.

    Samples with equal `group_index` form a group. A sample with a reward above 0.5 is correct. Its length is the
    number of tokens that its loss mask keeps.

    Args:
        args: slime's arguments.
        samples: samples of the whole rollout, flat or one list per prompt.
    Returns:
        (rewards, advantages), one number per sample, in order.
    """
    flat = list(_flat(samples))
    rewards = [float(sample.get_reward_value(args)) for sample in flat]
    # Without a loss mask, slime trains on every token of the response.
    lengths = [sample.response_length if sample.loss_mask is None else sum(sample.loss_mask) for sample in flat]
    advantages = compute_advantage(
        rewards,
        lengths,
        [sample.group_index for sample in flat],
        getattr(args, "retrain_mode", "dca"),
        max_tokens=getattr(args, "rollout_max_response_len", None),
        **(getattr(args, "retrain_params", None) or {}),
    )
    return rewards, advantages.tolist()


async def reward_for_slime(args: Any, sample: Any) -> Any:
    """Score a sample with a reward of `retrain`, as slime's custom reward model.

    Args:
        args: slime's arguments.
        sample: one sample, or with `--group-rm` a list of samples.
    Returns:
        The score, or a list of scores; 0 if the reward failed or returned None, because slime requires a number.
    """
    if isinstance(sample, list):
        members: list[Any] = sample
        return [await reward_for_slime(args, sample) for sample in members]
    item = {
        "completion": sample.response,
        "answer": str(sample.label),
        "prompt": sample.prompt,
        "length": sample.response_length,
        "max_tokens": getattr(args, "rollout_max_response_len", 0),
    }
    params = getattr(args, "retrain_reward_params", None) or {}
    # Scoring waits for a worker process, which must not stop slime's event loop.
    result = await asyncio.to_thread(score, getattr(args, "retrain_reward", "boxed_math"), params, item)
    return result.value or 0.0


def _flat(samples: Sequence[Any]) -> Iterator[Any]:
    for sample in samples:
        if isinstance(sample, list):
            members: list[Any] = sample
            yield from _flat(members)
        else:
            yield sample
