"""The parity check: sampler and trainer compute the same log-probs."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import torch

from retrain.errors import EngineError
from retrain.functional.mismatch import is_stale
from retrain.functional.seeds import derive_seed
from retrain.protocols import tolerance_of
from retrain.run.collectors.collector import PhaseTimer
from retrain.run.collectors.rollouts import requests_for, train_sampling
from retrain.run.collectors.rounds import Collection
from retrain.run.episodes import EpisodeRunner
from retrain.run.run_context import RunContext
from retrain.system.model_paths import positions, rope_length
from retrain.training.chat import TokenizedPrompt
from retrain.training.policy import TorchPolicy
from retrain.types import Batch, Metrics, Problem

_ROWS = 8
"""Number of completions that a check re-scores."""


def parity(context: RunContext, collection: Collection, timer: PhaseTimer) -> Metrics:
    """Check parity after every `[rollout] parity_every` weight syncs, from the first; 0 turns it off."""
    settings = context.config.rollout
    if not collection.kept or not settings.parity_every or collection.step % settings.parity_every:
        return {}
    # The coarser rounding of the two explains the difference.
    sampler, trainer = context.sampler.tolerance, tolerance_of(context.trained.policy.settings.dtype)
    with timer("parity"):
        batch = collection.batch
        assert batch is not None, "a rollout is kept"
        if settings.ahead:
            batch = _fresh(context, collection)
        elif collection.stored:  # other weights sampled these rows, and expert rows
            batch = batch.rows(torch.arange(len(collection.kept), device=batch.group_ids.device))
        limit = settings.parity_tolerance or max(sampler, trainer)
        return check_parity(context.trained.policy, batch, limit, exact=sampler < trainer)


def _fresh(context: RunContext, collection: Collection) -> Batch:
    """Sample a few of the step's prompts again, to check the sampler's present weights.

    With `[rollout] overlap` the step's own completions come from older weights.
    """
    few = list({rollout.group: rollout for rollout in collection.rollouts if rollout.length}.values())[:_ROWS]
    rendered = [(Problem(r.problem_id, r.prompt, r.answer), TokenizedPrompt(r.prompt, r.prompt_ids)) for r in few]
    seed = derive_seed(context.config.training.seed, "parity", collection.step)
    sampling = train_sampling(context.config, context.trained.loaded, seed)
    # A prompt that fitted may leave less room than max_tokens for a new completion.
    longest = positions(context.trained.loaded.model) - max(len(r.prompt_ids) for r in few)
    requests = requests_for(rendered, 1, int(min(context.config.training.max_tokens, longest)))
    rollouts = EpisodeRunner(context.sampler, context.chat, sampling).roll(rendered, requests)
    # Nothing scores these rollouts, and a batch needs a reward.
    return context.layout.batch([replace(rollout, reward=0.0) for rollout in rollouts], collection.step)


def check_parity(policy: TorchPolicy, batch: Batch, limit: float, exact: bool = False) -> Metrics:
    """Compare the sampler's log-probs of some rollouts with the trainer's.

    Call it before the update, while sampler and trainer hold the same weights. Stale or wrong
    sampler weights would otherwise corrupt training silently.

    Args:
        limit: largest mean absolute difference, in nats per token.
        exact: the sampler computes in float32 and the trainer does not. The test for staleness then
            uses the trainer's log-probs in float32. It is skipped if the weights themselves are
            rounded to bfloat16.
    Returns:
        parity/logp_diff_mean and parity/logp_diff_max, in nats per token; nothing if the batch has
        no sampled tokens.
    Raises:
        EngineError: the mean difference exceeds the limit, or the sampler is stale by `is_stale`,
            compared with LoRA's base or, without LoRA, with the weights of the last check.
    """
    part = batch.rows((~batch.is_expert).nonzero()[:_ROWS, 0])
    cells = part.response_mask
    if not cells.any():
        return {}
    sampler, trainer = part.sampler_logprobs[cells], policy.logprobs(part)["old_logprobs"][cells]
    difference = (trainer - sampler).abs()
    mean, largest = float(difference.mean()), float(difference.max())
    # `not <=` is also True for NaN.
    if not mean <= limit:
        fixed = rope_length(policy.model)
        cause = "most likely the sampler does not hold the trainer's weights"
        if part.attention_mask.sum(-1).max() > fixed:
            cause = (
                f"beyond {fixed:g} tokens the rotary frequencies of this model depend on other rows: lower max_tokens"
            )
        raise EngineError(
            f"sampler and trainer disagree: mean |log-prob difference| {mean:.3g} per token (largest {largest:.3g}), "
            f"tolerance {limit:.3g}; {cause}; if the difference is rounding, raise [rollout] parity_tolerance"
        )
    with policy.in_float32() if exact else nullcontext(True) as comparable:
        earlier = policy.earlier_logprobs(part) if comparable else None
        now = policy.logprobs(part)["old_logprobs"][cells] if exact and earlier is not None else trainer
    if earlier is not None and is_stale(sampler, now, earlier[cells]):
        old = "the weights of the last check" if policy.adapter is None else "the base without LoRA's adapter"
        raise EngineError(
            f"the sampler is stale: its log-probs are closer to those of {old} than to the "
            f"trainer's, from which they differ by {mean:.3g} per token; it holds old weights, or "
            'it rounds the update away, as [vllm] lora = "merged" does in bfloat16, or the two round '
            "weights differently: give the engine the dtype of [model]"
        )
    # The next check compares with these weights, to see whether the sampler still holds them.
    policy.remember()
    return {"parity/logp_diff_mean": mean, "parity/logp_diff_max": largest}
