"""verl: advantage estimators in verl's own registry, and a custom reward function.

`VERL_USE_EXTERNAL_MODULES=retrain.adapters.verl` makes verl import this module in each of its processes, and
importing it registers "retrain_" + name for every advantage. `algorithm.adv_estimator=retrain_dca` then selects
one, and `+algorithm.retrain.beta=0.3` sets its parameters.
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
    """Advantages in the form of verl's estimators.

    Args:
        token_level_rewards: [N, T]; their sum is the completion's reward, and above 0.5 it is correct.
        response_mask: [N, T]; its sum is the completion's length.
        index: [N] ids of the prompts, verl's `uid`.
        mode, params: as for `compute_advantage`.
    Returns:
        (advantages, returns), both the completion's advantage at each of its tokens: [N, T], 0 outside the mask.
    """
    lengths = response_mask.sum(-1).long()
    rewards = token_level_rewards.sum(-1)
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
    """A reward of `retrain` as verl's custom reward function.

    Args:
        data_source, extra_info: of the row; not looked at.
        solution_str: the completion. ground_truth: the answer.
        reward, params: name and parameters of the reward: verl's `custom_reward_function.reward_kwargs`.
    Returns:
        score, acc (1 if correct) and failed (1 if the reward crashed or ran out of time: verl has no mask for
        that, and the score is 0). A reward without an opinion scores 0 as well.
    """
    del data_source, extra_info
    verdict = score(reward, params or {}, {"completion": solution_str, "answer": str(ground_truth)})
    return {"score": verdict.value or 0.0, "acc": float(bool(verdict.correct)), "failed": float(verdict.status != "ok")}


def register() -> list[str]:
    """Put every advantage into verl's registry; returns their names there. Importing this module has done it."""
    core = importlib.import_module("verl.trainer.ppo.core_algos")
    names = sorted(portable_advantages())
    for name in names:
        # verl loads this file a second time, as another module, where a reward function is given by file.
        if PREFIX + name not in core.ADV_ESTIMATOR_REGISTRY:
            core.register_adv_est(PREFIX + name)(_estimator(name))
    return [PREFIX + name for name in names]


def _estimator(mode: str) -> Estimator:
    def estimator(
        token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any], config: Any = None, **_: Any
    ) -> tuple[Tensor, Tensor]:
        own = config.get("retrain", None) if config is not None else None
        return compute_advantage_for_verl(token_level_rewards, response_mask, index, mode, **dict(own or {}))

    estimator.__name__ = PREFIX + mode
    return estimator


if importlib.util.find_spec("verl") is not None:
    register()
