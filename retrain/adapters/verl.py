"""Adapter for verl: advantage estimators in verl's registry, and a custom reward function.

`VERL_USE_EXTERNAL_MODULES=retrain.adapters.verl` makes verl import this module in each of its processes. The import
registers every advantage as "retrain_" + name. `algorithm.adv_estimator=retrain_dca` then selects one, and
`+algorithm.retrain.beta=0.3` sets its parameters.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.adapters.core import compute_advantage, portable_advantages, score

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "retrain_"

Estimator = Callable[..., tuple["Tensor", "Tensor"]]


def compute_advantage_for_verl(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], mode: str = "dca", **params: Any
) -> tuple[Tensor, Tensor]:
    """Compute advantages with the interface of verl's estimators.

    Args:
        token_level_rewards: [N, T]; the sum of a row is the reward of the completion, which is correct if it is above
            0.5.
        response_mask: [N, T]; the sum of a row is the length of the completion.
        index: [N] ids of the prompts, verl's `uid`.
        mode: see `compute_advantage`.
        params: see `compute_advantage`.
    Returns:
        (advantages, returns), both [N, T] with the completion's advantage at each of its tokens, 0 outside the mask.
    """
    lengths = response_mask.sum(-1).long()
    rewards = token_level_rewards.sum(-1)
    # verl pads responses to its limit, so the width is the maximum number of tokens.
    width = int(response_mask.shape[-1])
    values = compute_advantage(rewards, lengths, index, mode, max_tokens=width, **params)
    advantages = values[:, None] * response_mask
    return advantages, advantages


def reward_for_verl(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    *,
    reward: str = "boxed_math",
    params: Mapping[str, Any] | None = None,
    **_: Any,
) -> dict[str, float]:
    """Score a completion with a reward of `retrain`, as verl's custom reward function.

    Args:
        data_source: not used.
        solution_str: the completion.
        ground_truth: the reference answer.
        extra_info: not used.
        reward: name of the reward, from verl's `custom_reward_function.reward_kwargs`.
        params: parameters of the reward, from the same place.
    Returns:
        `score`, `acc` (1 if correct) and `failed` (1 if the reward failed or timed out). The score of a failed reward
        is 0, because verl cannot mask it, and so is that of a reward that returned None.
    """
    del data_source, extra_info
    result = score(reward, params or {}, {"completion": solution_str, "answer": str(ground_truth)})
    return {"score": result.value or 0.0, "acc": float(bool(result.correct)), "failed": float(result.status != "ok")}


def register() -> list[str]:
    """Add every advantage to verl's registry, and return their names in it. Importing this module calls it."""
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    names = sorted(portable_advantages())
    for name in names:
        # If a reward function is given by file, verl loads this file a second time, as another module.
        if PREFIX + name not in core.ADV_ESTIMATOR_REGISTRY:
            core.register_adv_est(PREFIX + name)(_estimator(name))
    return [PREFIX + name for name in names]


def _estimator(mode: str) -> Estimator:
    def estimator(
        token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], config: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        settings = config.get("retrain", None) if config is not None else None
        return compute_advantage_for_verl(token_level_rewards, response_mask, index, mode, **dict(settings or {}))

    estimator.__name__ = PREFIX + mode
    return estimator


# verl only imports the module, so that the import itself must register.
if importlib.util.find_spec("verl") is not None:
    register()
