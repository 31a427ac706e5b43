"""Held-out evaluation: the same engine and rewards as training, on problems that training never sees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from retrain.config.resolve import mixed_labels
from retrain.errors import DataError
from retrain.functional.evaluation import mean_interval, pass_at_k
from retrain.functional.seeds import derive_seed
from retrain.run.collect import ask, roll, score
from retrain.run.run_parts import Parts
from retrain.training.chat import Posed
from retrain.types import Rollout, Sampling


def evaluate(parts: Parts, step: int) -> dict[str, Any]:
    """One row of eval.jsonl.

    `accuracy` is the mean over problems of the share of right completions, sampled at the
    evaluation temperature, with a 95% interval over problems; `greedy_accuracy` is one greedy
    completion per problem; `avg@n` equals `accuracy` and names n; `pass@k` is the unbiased estimate.
    `task/NAME` is a figure of the task's own.
    A completion whose score failed counts as wrong and is reported as `failed`. With `[[environments]]` or
    `[[tasks]]` there is `LABEL/accuracy` and the like for each of them, of its own problems, and with
    `[[eval.sets]]` for each set; if `[eval] problems` is 0, the figures of the first set are those without a label.

    Args:
        step: optimizer steps done so far. The sampling seed does not depend on it, so that two
            evaluations differ by the weights alone.
    Raises:
        DataError: there is no problem to evaluate on.
    """
    found = {name: _measure(one) for name, one in parts.sets.items()}
    whole = _measure(parts) if parts.config.eval.problems or not found else next(iter(found.values()))
    return {"step": step, **whole} | {
        f"{name}/{key}": value for name, row in found.items() for key, value in row.items()
    }


def _measure(parts: Parts) -> dict[str, Any]:
    """The figures of one set of problems."""
    settings = parts.config.eval
    problems = parts.task.heldout(settings.problems)
    if not problems:
        raise DataError(
            f"{settings.problems} held-out problems were asked for and the task has none of them; "
            "set [eval] problems, or let the task hold out more of its data; for training alone, problems = 0"
        )
    posed = [(problem, parts.chat.prompt(problem.prompt)) for problem in problems]
    sampled = _sample(parts, posed, settings.samples, settings.temperature)
    greedy = _sample(parts, posed, 1, 0.0) if settings.greedy else []
    shared = {"samples": settings.samples, "temperature": settings.temperature}
    row: dict[str, Any] = {**_figures(parts, sampled, greedy), **shared}
    for label in mixed_labels(parts.config):
        own = [[group for group in groups if group[0].environment == label] for groups in (sampled, greedy)]
        row |= {f"{label}/{name}": value for name, value in _figures(parts, *own).items()} if own[0] else {}
    return row | {f"task/{name}": float(value) for name, value in parts.task.figures(problems, sampled).items()}


def _figures(parts: Parts, sampled: Sequence[Sequence[Rollout]], greedy: Sequence[Sequence[Rollout]]) -> dict[str, Any]:
    """What the completions of some problems, and the greedy ones if there are any, show."""
    samples, several = parts.config.eval.samples, [rollout for group in sampled for rollout in group]
    counts = [sum(bool(rollout.correct) for rollout in group) for group in sampled]
    accuracy, low, high = mean_interval([count / samples for count in counts])
    found: dict[str, Any] = {
        "accuracy": accuracy,
        "ci_low": low,
        "ci_high": high,
        "avg_tokens": sum(rollout.length for rollout in several) / len(several),
        "truncated": sum(rollout.truncated for rollout in several) / len(several),
        "failed": sum(rollout.reward is None for rollout in several),
        "problems": len(sampled),
        f"avg@{samples}": accuracy,
    }
    if parts.world is not None:
        found["turns"] = sum(len(rollout.turns) for rollout in several) / len(several)
    for k in parts.config.eval.pass_at:
        found[f"pass@{k}"] = sum(pass_at_k(samples, count, k) for count in counts) / len(counts)
    if greedy:
        found["greedy_accuracy"] = sum(bool(group[0].correct) for group in greedy) / len(greedy)
    return found


def _sample(parts: Parts, posed: list[Posed], samples: int, temperature: float) -> list[list[Rollout]]:
    settings = parts.config.eval
    sampling = Sampling(
        temperature=temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        stop_ids=parts.loaded.stop_ids,
        seed=derive_seed(settings.seed, "evaluation"),
    )
    max_tokens = settings.max_tokens or parts.config.training.max_tokens
    rollouts = score(parts, posed, roll(parts, posed, ask(posed, samples, max_tokens), sampling), max_tokens)
    return [rollouts[i : i + samples] for i in range(0, len(rollouts), samples)]
