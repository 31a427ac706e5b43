"""Adapter for TRL: a subclass of GRPOTrainer with the advantages and token transforms of `retrain`.

from retrain.adapters.trl import grpo_trainer
trainer = grpo_trainer("dca", beta=0.2)(model=..., reward_funcs=..., args=..., train_dataset=...)
trainer = grpo_trainer("maxrl", transform="gtpo_sepa")(model=..., reward_funcs=..., args=..., train_dataset=...)

`retrain.adapters.HICRATrainer` and `HICRAConfig` provide HICRA with the parameters of its documentation for TRL.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from retrain.adapters.core import bind, compute_advantage
from retrain.adapters.token_credit import Tables, TokenCredit, load_credit
from retrain.types import Batch

if TYPE_CHECKING:
    from torch import Tensor


def grpo_trainer(
    mode: str | None = "dca", *, transform: str | Sequence[str] = "none", tables: Tables | None = None, **params: Any
) -> Any:
    """Return a subclass of TRL's GRPOTrainer that computes its advantages with `mode` and `transform`.

    Args:
        mode: see `[algorithm] advantage_mode`; None applies the transforms to TRL's own advantages.
        transform: see `[algorithm] transform_mode`: "gtpo", "gtpo_hicra", "gtpo_sepa", a list of stages ...
        tables: parameters of transforms and signals: {"gtpo": {"beta": 0.3}, "planning": {"strategic_grams": "math"}}.
        params: parameters of the mode.
    Raises:
        ComponentError: the mode is unknown, or a parameter of the mode is invalid.
        ConfigError: another setting is invalid.
    """
    if mode is not None:
        # First, because its message names the parameter as the caller wrote it.
        bind("advantage", mode, params)
    load_credit(mode, params, transform, tables)
    base = importlib.import_module("trl").GRPOTrainer
    settings = {"retrain_mode": mode, "retrain_params": params, "retrain_transform": transform}
    return type("RetrainGRPOTrainer", (AdvantageMixin, base), {**settings, "retrain_tables": tables or {}})


class AdvantageMixin:
    """Mixin that replaces the advantages of GRPOTrainer. List it before GRPOTrainer in the bases of a class.

    The reward of a completion is TRL's weighted sum. The first reward function that did not return None determines
    whether the completion is correct (above 0.5). The length is its number of tokens. Unless `retrain_mode` is None,
    `scale_rewards` and `multi_objective_aggregation` have no effect. A completion for which all reward functions
    returned None is excluded and gets the advantage 0.

    With a transform, TRL's loss gets advantages [N, T]. This costs one forward pass per batch of rollouts, because
    transforms read the policy's log-probs and entropies. Groups include the completions of all processes.
    """

    retrain_mode: ClassVar[str | None] = "dca"
    retrain_params: ClassVar[Mapping[str, Any]] = {}
    retrain_transform: ClassVar[str | Sequence[str]] = "none"
    retrain_tables: Tables = MappingProxyType({})
    _credit: TokenCredit | None = None

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """Return TRL's rewards per function of all processes. Store them and the lengths for the advantages."""
        import torch

        trainer: Any = super()
        rewards = trainer._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        # The rewards that TRL returns are those of all processes, so the lengths must be as well.
        lengths = torch.tensor([len(ids) for ids in completion_ids_list], device=rewards.device)
        self._retrain_seen = (rewards, self._retrain_trainer.accelerator.gather(lengths))
        return rewards

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        """Return TRL's batch with the advantages replaced."""
        trainer: Any = super()
        output = trainer._generate_and_score_completions(inputs)
        if self.retrain_transform == "none":
            advantages = logged = self._retrain_advantages()
        else:
            advantages = self._retrain_token_advantages(output)
            logged = advantages.sum(-1) / (advantages != 0).sum(-1).clamp(min=1)
        # TRL has already logged its own advantages, which these replace.
        log = self._retrain_trainer._logs["advantages"]
        for _ in range(min(len(log), len(advantages))):
            log.pop()
        log.extend(logged.tolist())
        count = len(output["advantages"])
        # Advantages are those of all processes, and TRL wants those of this one.
        first = self._retrain_trainer.accelerator.process_index * count
        local = advantages[first : first + count]
        output["advantages"] = local if local.dim() == 1 else local[:, : output["completion_ids"].shape[1]]
        return output

    @property
    def _retrain_trainer(self) -> Any:
        """This object, typed as Any because the type checker does not know the attributes of GRPOTrainer."""
        return self

    def _retrain_rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return rewards, correctness, groups, and whether a completion has a reward: [N] each, of all processes.

        Rows are in the order of TRL's rewards, in which the members of a group are contiguous.
        """
        import torch

        trainer = self._retrain_trainer
        per_function, _ = self._retrain_seen
        # An evaluation may sample another number per prompt.
        size = trainer.num_generations if trainer.model.training else trainer.num_generations_eval
        given = ~per_function.isnan()
        # NaN stands for None, a function that does not apply; the others are summed.
        rewards = (per_function * trainer.reward_weights.to(per_function)).nansum(dim=1)
        # `argmax` returns the first 1, so this is the first function with a value.
        correct = per_function.gather(1, given.int().argmax(dim=1, keepdim=True))[:, 0] > 0.5
        groups = torch.arange(len(rewards), device=rewards.device) // size
        return rewards, correct, groups, given.any(dim=1)

    def _retrain_advantages(self) -> Tensor:
        """Return the episode advantages [N] of all processes; 0 for completions without a reward."""
        import torch

        rewards, correct, groups, scored = self._retrain_rows()
        advantages = torch.zeros_like(rewards)
        advantages[scored] = compute_advantage(
            rewards[scored],
            self._retrain_seen[1][scored],
            groups[scored],
            self.retrain_mode or "dca",
            correct=correct[scored],
            max_tokens=self._retrain_trainer.max_completion_length,
            **self.retrain_params,
        )
        return advantages

    def _retrain_token_advantages(self, output: Mapping[str, Any]) -> Tensor:
        """Return the advantages [N, T] of all processes, 0 outside sampled tokens. TRL logs their metrics."""
        trainer = self._retrain_trainer
        if self._credit is None:
            self._credit = self._retrain_credit()
        batch, scored = self._retrain_batch(output, self._credit)
        learns = bool(trainer.model.training)
        # A completion without a reward must not be part of any mean.
        credited, metrics = self._credit(batch.rows(scored.nonzero()[:, 0]), learns)
        for name, value in metrics.items():
            trainer._metrics["train" if learns else "eval"][name].append(value)
        advantages = batch.advantages.new_zeros(batch.advantages.shape)
        advantages[scored, : credited.advantages.shape[1]] = credited.advantages
        return advantages

    def _retrain_credit(self) -> TokenCredit:
        """Build the pipeline with the parts of this trainer."""
        trainer, args = self._retrain_trainer, self._retrain_trainer.args
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        resources = {
            "tokenizer": tokenizer,
            "total_steps": max(trainer.state.max_steps, args.max_steps, 0),
            "seed": args.seed,
            "max_tokens": trainer.max_completion_length,
            "group_size": trainer.num_generations,
            "temperature": trainer.temperature,
        }
        loaded = load_credit(self.retrain_mode, self.retrain_params, self.retrain_transform, self.retrain_tables)
        return TokenCredit(loaded, resources, has_advantages=self.retrain_mode is None)

    def _retrain_batch(self, output: Mapping[str, Any], credit: TokenCredit) -> tuple[Batch, Tensor]:
        """Return the completions of all processes as a batch, and which rows have a reward."""
        import torch

        trainer = self._retrain_trainer
        sampled = output["completion_mask"] * output.get("tool_mask", 1)
        columns = self._retrain_scores(output, credit.policy_columns | {"old_logprobs"})
        given = output.get("sampling_per_token_logps")
        # Without vLLM, TRL samples with the policy itself, whose log-probs are then the sampler's.
        drawn = columns["old_logprobs"] if given is None else given.where(~given.isnan(), columns["old_logprobs"])
        credited = output["advantages"][:, None] * sampled

        def gather(local: Tensor) -> Tensor:
            return trainer.accelerator.gather(trainer.accelerator.pad_across_processes(local, dim=1))

        mask = gather(sampled).bool()
        ids = gather(output["completion_ids"])
        rewards, correct, groups, scored = self._retrain_rows()
        turn_ids, turn_rewards = _turns(mask, rewards)
        batch = Batch(
            input_ids=ids,
            attention_mask=gather(output["completion_mask"]).bool(),
            response_mask=mask,
            sampler_logprobs=gather(drawn * sampled),
            rewards=rewards,
            correct=correct,
            lengths=self._retrain_seen[1],
            group_ids=groups,
            is_expert=torch.zeros_like(correct),
            advantages=gather(credited),
            step=trainer.state.global_step,
            max_tokens=trainer.max_completion_length,
            reward_parts=self._retrain_seen[0],
            reward_weights=tuple(trainer.reward_weights.tolist()),
            turn_ids=turn_ids,
            turn_rewards=turn_rewards,
        )
        return batch.replace(**{name: gather(column) for name, column in columns.items()}), scored

    def _retrain_scores(self, output: Mapping[str, Any], names: frozenset[str]) -> dict[str, Tensor]:
        """Compute columns of the policy by a forward pass: [n, T] each, of this process, 0 outside sampled tokens.

        Args:
            output: TRL's batch.
            names: names of the columns, from POLICY_COLUMNS.
        """
        import torch

        from retrain.functional.logprobs import token_scores

        trainer = self._retrain_trainer
        if "pixel_values" in output:
            raise ValueError('token transforms do not support images; use transform="none"')
        prompts, completions = output["prompt_ids"], output["completion_ids"]
        ids = torch.cat([prompts, completions], dim=1)
        mask = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
        sampled = (output["completion_mask"] * output.get("tool_mask", 1)).bool()
        columns = {name: completions.new_zeros(completions.shape, dtype=torch.float32) for name in names}
        size = trainer.args.per_device_train_batch_size
        for first in range(0, len(ids), size):
            rows = slice(first, first + size)
            with torch.no_grad(), trainer.accelerator.autocast():
                logits = trainer.model(input_ids=ids[rows], attention_mask=mask[rows]).logits
            here = sampled[rows]
            # The logits at a token predict the next one.
            before = logits[:, prompts.shape[1] - 1 : -1][here]
            scores = token_scores(
                before,
                lambda part: part,
                completions[rows][here],
                temperature=trainer.temperature,
                squares="sum_pi_squared" in names,
            )
            for name in names:
                columns[name][rows][here] = getattr(scores, "logprobs" if name == "old_logprobs" else name)
        return columns


def _turns(mask: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns `turn_ids` and `turn_rewards`. A turn is a sequence of sampled tokens between tool outputs."""
    starts = mask & ~mask.roll(1, dims=1)
    # `roll` wraps around: the last column is not before the first.
    starts[:, 0] = mask[:, 0]
    remaining = mask.flip(-1).cumsum(-1).flip(-1)
    # Tokens before the first turn would be in turn -1.
    ids = (starts.cumsum(-1) - 1).clamp(min=0) * mask
    return ids, rewards[:, None].where(mask & (remaining == 1), 0.0)
