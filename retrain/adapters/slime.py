"""slime: a reward post-process that turns the rewards of a rollout into advantages, and a custom reward.

--custom-reward-post-process-path retrain.adapters.slime.compute_advantage_for_slime
--custom-rm-path retrain.adapters.slime.reward_for_slime

Settings are attributes of slime's arguments, which `--custom-config-path` reads from a YAML file: retrain_mode,
retrain_params, retrain_reward and retrain_reward_params. slime's estimator "grpo" spreads what the
post-process returns over the tokens of each sample as it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from retrain.adapters.core import compute_advantage, score


def compute_advantage_for_slime(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Rewards and advantages of a rollout, as slime's reward post-process hook returns them.

    Args:
        args: slime's arguments. samples: of the whole rollout, flat or one list per prompt.
    Returns:
        (raw rewards, advantages), one number per sample, in order. Groups are equal `group_index`; a reward above
        0.5 is correct; the length is the number of tokens that the loss mask keeps.
    """
    flat = list(_flat(samples))
    rewards = [float(sample.get_reward_value(args)) for sample in flat]
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
    """A reward of `retrain` as slime's custom reward model.

    Args:
        sample: one sample, or with `--group-rm` a list of them.
    Returns:
        The score, or a list of scores; 0 where the reward failed or has no opinion, since slime needs a number.
    """
    if isinstance(sample, list):
        members: list[Any] = sample
        return [await reward_for_slime(args, one) for one in members]
    item = {
        "completion": sample.response,
        "answer": str(sample.label),
        "prompt": sample.prompt,
        "length": sample.response_length,
        "max_tokens": getattr(args, "rollout_max_response_len", 0),
    }
    params = getattr(args, "retrain_reward_params", None) or {}
    verdict = await asyncio.to_thread(score, getattr(args, "retrain_reward", "boxed_math"), params, item)
    return verdict.value or 0.0


def _flat(samples: Sequence[Any]) -> Iterator[Any]:
    for sample in samples:
        if isinstance(sample, list):
            members: list[Any] = sample
            yield from _flat(members)
        else:
            yield sample
