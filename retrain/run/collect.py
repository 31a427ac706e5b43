"""From prompts to a scored batch: sample, score, collate, and resample what teaches nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from retrain.engines.capability import positions
from retrain.errors import DataError
from retrain.functional.seeds import derive_seed
from retrain.run.run_parts import Parts
from retrain.training.expert_tokens import ExpertRow
from retrain.training.model.loading import render
from retrain.types import Batch, Metrics, Problem, Rollout, Sampling

_MOST_TOO_LONG = 1000


@dataclass(frozen=True)
class Collection:
    """The rollouts of one step.

    Attributes:
        step: the step that trains on them, from 0.
        rollouts: everything that was sampled, failed scores included.
        experts: rows of an expert to train on beside them.
        batch: the rows to train on, an expert's last; None when there is none, because no group has two valid rewards.
        kept: index into `rollouts` of every row of the batch that is not an expert's.
        cursor: the next unused problem of the task.
        dropped: what the filter said of the groups that it kept out of the batch.
        metrics: rollout and reward statistics.
    """

    step: int
    rollouts: list[Rollout]
    experts: list[ExpertRow]
    batch: Batch | None
    kept: list[int]
    cursor: int
    metrics: Metrics
    dropped: Metrics


def collect(parts: Parts, step: int, cursor: int) -> Collection:
    """Sample and score the rollouts of one step.

    With `[rollout] overlap` this runs beside the trainer: it reads nothing that an update changes.

    A filter that judges rollouts alone drops its groups here. With `[rollout] resample` on, the groups that any
    filter drops are replaced by new prompts, at most `max_resample` times; after that the step trains on the fewer
    groups it has.
    """
    training, rollout = parts.config.training, parts.config.rollout
    rounds = 1 + (rollout.max_resample if rollout.resample != "none" else 0)
    rollouts: list[Rollout] = []
    kept: list[int] = []
    dropped: Metrics = {}
    too_long = 0
    for attempt in range(rounds):
        missing = parts.prompts - len({rollouts[i].group for i in kept})
        if missing == 0:
            break
        problems, cursor, out = draw(parts, cursor, missing)
        too_long += out
        first = rollouts[-1].group + 1 if rollouts else 0
        sampling = train_sampling(parts, derive_seed(training.seed, "sampling", step, attempt))
        fresh = roll(parts, problems, sampling, first)
        valid = valid_rows(fresh)
        if rollout.resample != "none" or parts.pipeline.judges_rollouts:
            keep, counts = _passes(parts, [fresh[i] for i in valid], step)
            valid = [i for i, passes in zip(valid, keep, strict=True) if passes]
            dropped = added(dropped, counts)
        kept += [len(rollouts) + i for i in valid]
        rollouts += fresh
    metrics = rollout_metrics(rollouts) | {"rollout/too_long": float(too_long)} | parts.sampler.metrics()
    metrics["rollout/staleness"] = step - sum(r.weights_version for r in rollouts) / len(rollouts)
    experts: list[ExpertRow] = []
    if parts.experts is not None:
        experts = parts.experts.draw({rollout.group: rollout.prompt_ids for rollout in rollouts}.values())
        metrics |= parts.experts.metrics()
    batch = collate(parts, [rollouts[i] for i in kept], step, experts) if kept or experts else None
    return Collection(step, rollouts, experts, batch, kept, cursor, metrics, dropped)


def added(counts: Metrics, more: Metrics) -> Metrics:
    """Counts of two rounds, name by name; a name that only one of them has keeps its count."""
    return {name: counts.get(name, 0.0) + more.get(name, 0.0) for name in counts | more}


def draw(parts: Parts, cursor: int, count: int) -> tuple[list[Problem], int, int]:
    """The next `count` problems that leave room for a completion, the cursor behind them, and how many did not.

    One prompt that is too long for the model must not end a run that has gone on for hours.
    """
    limit, found, first = positions(parts.loaded.model), list[Problem](), cursor
    longest = math.inf if limit is None else limit - parts.config.training.max_tokens
    while len(found) < count:
        if cursor - first - len(found) >= _MOST_TOO_LONG:
            raise DataError(
                f"{_MOST_TOO_LONG} prompts in one step are longer than the {longest} tokens that max_tokens leaves of "
                f"the model's {limit}; lower [training] max_tokens, or leave them out of the data"
            )
        problem = parts.task.problem(cursor)
        cursor += 1
        if len(render(parts.loaded.tokenizer, problem.prompt, parts.config.model.chat)[1]) <= longest:
            found.append(problem)
    return found, cursor, cursor - first - count


def train_sampling(parts: Parts, seed: int) -> Sampling:
    """Sampling for training: the trainer takes its log-probs at the same temperature, over the same support."""
    training, rollout = parts.config.training, parts.config.rollout
    return Sampling(
        group_size=training.group_size,
        max_tokens=training.max_tokens,
        temperature=training.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        stop_ids=parts.loaded.stop_ids,
        seed=seed,
    )


def roll(parts: Parts, problems: Sequence[Problem], sampling: Sampling, first_group: int = 0) -> list[Rollout]:
    """Sample every problem's group and score it. Token ids stay as sampled; text is decoded for rewards only."""
    rendered = [render(parts.loaded.tokenizer, problem.prompt, parts.config.model.chat) for problem in problems]
    groups = parts.sampler.sample([ids for _, ids in rendered], sampling)
    rollouts = [
        Rollout(
            problem_id=problem.id,
            prompt=text,
            answer=problem.answer,
            prompt_ids=tuple(ids),
            completion_ids=completion.ids,
            sampler_logprobs=completion.logprobs,
            text=parts.loaded.decode(completion.ids),
            finish_reason=completion.finish_reason,
            weights_version=completion.weights_version,
            group=first_group + index,
        )
        for index, (problem, (text, ids), group) in enumerate(zip(problems, rendered, groups, strict=True))
        for completion in group
    ]
    owners = [problem for problem, group in zip(problems, groups, strict=True) for _ in group]
    return score(parts, owners, rollouts, sampling.max_tokens)


def score(parts: Parts, problems: Sequence[Problem], rollouts: Sequence[Rollout], max_tokens: int) -> list[Rollout]:
    """The rollouts with reward, parts, correctness and status filled in by the reward pool."""
    items: list[dict[str, Any]] = [
        {
            "completion": rollout.text,
            "answer": problem.answer,
            "prompt": rollout.prompt,
            "problem": {"id": problem.id, "prompt": problem.prompt, "answer": problem.answer, "extra": problem.extra},
            "length": len(rollout.completion_ids),
            "max_tokens": max_tokens,
            "finish_reason": rollout.finish_reason,
        }
        for problem, rollout in zip(problems, rollouts, strict=True)
    ]
    return [
        replace(rollout, reward=s.value, parts=dict(s.parts), correct=s.correct, status=s.status)
        for rollout, s in zip(rollouts, parts.pool.score(items), strict=True)
    ]


def valid_rows(rollouts: Sequence[Rollout]) -> list[int]:
    """Rows with a reward, of groups that failures did not shrink below two."""
    valid = [i for i, rollout in enumerate(rollouts) if rollout.reward is not None]
    sampled, scored = _sizes(rollouts), _sizes([rollouts[i] for i in valid])
    return [i for i in valid if scored[rollouts[i].group] >= min(2, sampled[rollouts[i].group])]


def _sizes(rollouts: Sequence[Rollout]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for rollout in rollouts:
        sizes[rollout.group] = sizes.get(rollout.group, 0) + 1
    return sizes


def _passes(parts: Parts, rollouts: Sequence[Rollout], step: int) -> tuple[list[bool], Metrics]:
    """Which rows the filter keeps, and what it counts; credit is computed only for a filter that reads it."""
    if not rollouts:
        return [], {}
    batch = collate(parts, rollouts, step)
    if not parts.pipeline.judges_rollouts:
        batch, _ = parts.pipeline.credit(with_policy_columns(parts, batch))
    keep, counts = parts.pipeline.informative(batch)
    return keep.tolist(), counts


def with_policy_columns(parts: Parts, batch: Batch) -> Batch:
    """Add what credit needs from the policy's scoring forward; no forward if it needs nothing."""
    columns = sorted(parts.pipeline.policy_columns)
    return batch.replace(**parts.policy.logprobs(batch, columns)) if columns else batch


def collate(parts: Parts, rollouts: Sequence[Rollout], step: int, experts: Sequence[ExpertRow] = ()) -> Batch:
    """Right-pad rollouts, and behind them expert rows, into a batch (see `Batch` for the layout).

    An expert row has no reward, no advantage and a group of its own, which no rollout belongs to.
    """
    rows = [_rollout_row(parts, rollout) for rollout in rollouts] + [_expert_row(row) for row in experts]
    first = max((rollout.group for rollout in rollouts), default=-1) + 1
    nothing = [0.0] * len(experts)
    width, device = max(len(ids) for ids, _, _ in rows), parts.policy.device
    input_ids = torch.full((len(rows), width), parts.loaded.pad_id, dtype=torch.long)
    attention = torch.zeros(len(rows), width, dtype=torch.bool)
    response = torch.zeros(len(rows), width, dtype=torch.bool)
    logprobs = torch.zeros(len(rows), width)
    for row, (ids, spans, scores) in enumerate(rows):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        attention[row, : len(ids)] = True
        for start, end in spans:
            response[row, start:end] = True
        logprobs[row, len(ids) - len(scores) : len(ids)] = torch.tensor(scores)
    return Batch(
        input_ids=input_ids.to(device),
        attention_mask=attention.to(device),
        response_mask=response.to(device),
        sampler_logprobs=logprobs.where(response, 0.0).to(device),
        rewards=torch.tensor([*(r.reward for r in rollouts), *nothing], dtype=torch.float32, device=device),
        correct=torch.tensor([*(bool(r.correct) for r in rollouts), *map(bool, nothing)], device=device),
        lengths=torch.tensor(
            [*(len(r.completion_ids) for r in rollouts), *(sum(b - a for a, b in row.spans) for row in experts)],
            device=device,
        ),
        group_ids=torch.tensor([*(r.group for r in rollouts), *range(first, first + len(experts))], device=device),
        is_expert=(torch.arange(len(rows)) >= len(rollouts)).to(device),
        advantages=torch.zeros(len(rows), width, device=device),
        step=step,
        max_tokens=parts.config.training.max_tokens,
    )


_Row = tuple[Sequence[int], Sequence[tuple[int, int]], Sequence[float]]
"""(token ids, spans to train on, log-probs of the last tokens)"""


def _rollout_row(parts: Parts, rollout: Rollout) -> _Row:
    ids = (*rollout.prompt_ids, *rollout.completion_ids)
    masked = parts.config.rollout.mask_truncated and rollout.finish_reason == "length"
    return ids, [] if masked else [(len(rollout.prompt_ids), len(ids))], rollout.sampler_logprobs


def _expert_row(row: ExpertRow) -> _Row:
    return row.ids, row.spans, ()


def rollout_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """What was sampled, over every rollout; means are over completions."""
    scored = [r for r in rollouts if r.reward is not None]
    rewards = [float(r.reward) for r in scored if r.reward is not None]
    lengths = [len(r.completion_ids) for r in rollouts]
    count = max(1, len(scored))
    mean = sum(rewards) / count
    metrics = {
        "reward/mean": mean,
        "reward/std": (sum((value - mean) ** 2 for value in rewards) / count) ** 0.5,
        "reward/accuracy": sum(bool(r.correct) for r in scored) / count,
        "reward/failed": float(len(rollouts) - len(scored)),
        "tokens/response": sum(lengths) / len(lengths),
        "tokens/sampled": float(sum(lengths)),
        "rollout/truncated": sum(r.finish_reason == "length" for r in rollouts) / len(rollouts),
        "rollout/completions": float(len(rollouts)),
    }
    for name in sorted({name for r in scored for name in r.parts}):
        values = [part for r in scored if (part := r.parts.get(name)) is not None]
        if values:
            metrics[f"reward/{name}"] = sum(values) / len(values)
    return metrics
