"""TRL: GRPOTrainer with the advantages of `retrain`, as a subclass.

from retrain.adapters.trl import grpo_trainer
trainer = grpo_trainer("dca", beta=0.2)(model=..., reward_funcs=..., args=..., train_dataset=...)
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from retrain.adapters.core import bind, compute_advantage

if TYPE_CHECKING:
    from torch import Tensor


def grpo_trainer(mode: str = "dca", **params: Any) -> Any:
    """A subclass of TRL's GRPOTrainer whose advantages are those of `mode`; everything else is TRL's.

    Raises:
        ComponentError: an unknown mode, or a parameter that it does not take.
    """
    bind("advantage", mode, params)
    base = importlib.import_module("trl").GRPOTrainer
    return type("RetrainGRPOTrainer", (AdvantageMixin, base), {"retrain_mode": mode, "retrain_params": params})


class AdvantageMixin:
    """Goes before GRPOTrainer, or a subclass of it, in the bases of a class.

    Rewards are TRL's weighted sum; the first reward function with an opinion says what is correct (above 0.5);
    lengths are tokens of the completion. `scale_rewards` and `multi_objective_aggregation` change nothing. A
    completion that no reward function scored takes no part and gets 0.
    """

    retrain_mode: ClassVar[str] = "dca"
    retrain_params: ClassVar[Mapping[str, Any]] = {}

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """TRL's rewards per function, of all processes; kept, with the lengths, for the advantages."""
        import torch

        trainer: Any = super()
        rewards = trainer._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        lengths = torch.tensor([len(ids) for ids in completion_ids_list], device=rewards.device)
        self._retrain_seen = (rewards, self._self.accelerator.gather(lengths))
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """TRL's batch with the advantages replaced."""
        trainer: Any = super()
        output = trainer._generate_and_score_completions(inputs)
        advantages = self._retrain_advantages()
        log = self._self._logs["advantages"]
        for _ in range(min(len(log), len(advantages))):
            log.pop()
        log.extend(advantages.tolist())
        own = len(output["advantages"])
        first = self._self.accelerator.process_index * own
        output["advantages"] = advantages[first : first + own]
        return output

    @property
    def _self(self) -> Any:
        """This object with the attributes of GRPOTrainer, which the type checker does not see."""
        return self

    def _retrain_advantages(self) -> Tensor:
        """[N] of all processes, in the order of TRL's rewards: whole groups, one after the other."""
        import torch

        trainer = self._self
        per_function, lengths = self._retrain_seen
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        given = ~per_function.isnan()
        scored = given.any(dim=1)
        rewards = (per_function * trainer.reward_weights.to(per_function)).nansum(dim=1)
        correct = per_function.gather(1, given.int().argmax(dim=1, keepdim=True))[:, 0] > 0.5
        groups = torch.arange(len(rewards), device=rewards.device) // size
        advantages = torch.zeros_like(rewards)
        advantages[scored] = compute_advantage(
            rewards[scored],
            lengths[scored],
            groups[scored],
            self.retrain_mode,
            correct=correct[scored],
            max_tokens=trainer.max_completion_length,
            **self.retrain_params,
        )
        return advantages
