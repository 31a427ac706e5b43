"""The parity gate: does the sampler compute what the trainer computes?"""

from __future__ import annotations

from dataclasses import replace

from retrain.engines.capability import tolerance_of
from retrain.errors import EngineError
from retrain.functional.mismatch import is_stale
from retrain.functional.seeds import derive_seed
from retrain.run.collect import Collection, collate, train_sampling
from retrain.run.run_parts import Parts
from retrain.types import Batch, Metrics

_ROWS = 8
"""Completions re-scored per check: enough to see wrong weights, cheap enough to forget about."""


def parity_due(parts: Parts, step: int) -> bool:
    """After the first weight sync and then every `[rollout] parity_every` of them; 0 switches it off."""
    every = parts.config.rollout.parity_every
    return every > 0 and step % every == 0


def fresh_batch(parts: Parts, collection: Collection) -> Batch:
    """Completions of some of the step's prompts, sampled now: those that were sampled ahead show older weights."""
    few = list({rollout.group: rollout for rollout in collection.rollouts}.values())[:_ROWS]
    seed = derive_seed(parts.config.training.seed, "parity", collection.step)
    sampling = replace(train_sampling(parts, seed), group_size=1)
    groups = parts.sampler.sample([rollout.prompt_ids for rollout in few], sampling)
    sampled = [
        replace(
            rollout,
            completion_ids=completion.ids,
            sampler_logprobs=completion.logprobs,
            finish_reason=completion.finish_reason,
            weights_version=completion.weights_version,
            reward=0.0,
        )
        for rollout, (completion,) in zip(few, groups, strict=True)
    ]
    return collate(parts, sampled, collection.step)


def check_parity(parts: Parts, batch: Batch) -> Metrics:
    """Re-score some rollouts with the trainer and compare with the sampler's own log-probs.

    Call it before the update: sampler and trainer then hold the same weights.

    Returns:
        parity/logp_diff_mean and parity/logp_diff_max, in nats per token.
    Raises:
        EngineError: the mean difference exceeds the tolerance, or the sampler is nearer to the policy without its
            update (see `is_stale`): with LoRA that is the base, else the weights of the last check. Stale or wrong
            sampler weights are the most expensive silent failure there is.
    """
    rows = (~batch.is_expert).nonzero()[:_ROWS, 0]
    if not len(rows):
        return {}
    part = batch.rows(rows)
    cells = part.response_mask
    sampler, trainer = part.sampler_logprobs[cells], parts.policy.logprobs(part)["old_logprobs"][cells]
    if not len(sampler):
        return {}
    difference = (trainer - sampler).abs()
    mean, largest = float(difference.mean()), float(difference.max())
    rounding = max(parts.sampler.tolerance, tolerance_of(parts.policy.settings.dtype))
    limit = parts.config.rollout.parity_tolerance or rounding
    if not mean <= limit:
        raise EngineError(
            f"sampler and trainer disagree: mean |log-prob difference| {mean:.3g} per token (largest {largest:.3g}), "
            f"tolerance {limit:.3g}; the likeliest cause is that the sampler does not hold the trainer's weights; "
            "if the difference is rounding, raise [rollout] parity_tolerance"
        )
    earlier = parts.policy.earlier_logprobs(part)
    if earlier is not None and is_stale(sampler, trainer, earlier[cells]):
        old = "the weights of the last check" if parts.policy.adapter is None else "the base without LoRA's adapter"
        raise EngineError(
            f"the sampler has not followed the update: its log-probs are nearer to those of {old} than to the "
            f"trainer's, from which they differ by {mean:.3g} per token; it holds old weights, or it rounds the update "
            'away, as [vllm] lora = "merged" does in bfloat16'
        )
    parts.policy.remember()
    return {"parity/logp_diff_mean": mean, "parity/logp_diff_max": largest}
