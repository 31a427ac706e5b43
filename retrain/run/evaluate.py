"""Held-out evaluation, with the engine and rewards of training, on problems training never sees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from retrain.config.slots import mixed_labels
from retrain.errors import DataError
from retrain.functional.evaluation import mean_interval, pass_at_k
from retrain.functional.seeds import derive_seed
from retrain.run.collectors.rollouts import requests_for, roll, score
from retrain.run.run_context import RunContext
from retrain.training.chat import RenderedPrompt
from retrain.types import Rollout

if TYPE_CHECKING:
    from retrain.config.sections.heldout import Eval


class Evaluation(NamedTuple):
    """The result of an evaluation.

    Attributes:
        row: the row of eval.jsonl.
        completions: rows for `retrain score`, one for each problem, by the name of the set; "" is
            the run's own task.
    """

    row: dict[str, Any]
    completions: Mapping[str, list[dict[str, Any]]]


def measure(context: RunContext, step: int) -> Evaluation:
    """Evaluate the policy on every set of held-out problems.

    Figures of the row:

    - `accuracy`: mean over problems of the share of correct completions, sampled at the evaluation
      temperature. `ci_low` and `ci_high` are its 95% confidence interval over problems.
    - `avg@n`: the same number; the name gives the n completions per problem.
    - `pass@k`: the unbiased estimate.
    - `greedy_accuracy`: accuracy of one greedy completion per problem.
    - `failed`: completions whose scoring failed. They count as wrong.
    - `task/NAME`: figures that the task computes itself.
    - `LABEL/...`: the same figures for each of `[[environments]]`, `[[tasks]]` or `[[eval.sets]]`.
      If `[eval] problems` is 0, the first set also gives the figures without a label.

    Args:
        step: optimizer steps done so far. The sampling seed does not depend on it, so two
            evaluations differ only by the weights.
    Raises:
        DataError: a set has no held-out problems.
    """
    evaluations = {name: _measure(set_context) for name, set_context in context.sets.items()}
    if context.config.eval.problems or not evaluations:
        evaluations = {"": _measure(context), **evaluations}
    # With [eval] problems = 0 the first set stands for the whole, so that campaigns find an accuracy.
    whole = next(iter(evaluations.values())).row
    sets = {
        f"{name}/{key}": value
        for name, evaluation in evaluations.items()
        if name
        for key, value in evaluation.row.items()
    }
    return Evaluation(
        {"step": step, **whole} | sets, {name: evaluation.completions[""] for name, evaluation in evaluations.items()}
    )


def _measure(context: RunContext) -> Evaluation:
    """Evaluate on one set of problems."""
    settings = context.config.eval
    problems = context.task.heldout(settings.problems)
    if not problems:
        raise DataError(
            f"[eval] problems = {settings.problems}, but the task has no held-out problems; "
            "let the task hold out some of its data, or set [eval] problems = 0 to train without evaluation"
        )
    rendered = [(problem, context.chat.prompt_of(problem)) for problem in problems]
    sampled = _sample(context, rendered, settings.samples, settings.temperature)
    greedy = _sample(context, rendered, 1, 0.0) if settings.greedy else []
    shared = {"samples": settings.samples, "temperature": settings.temperature}
    row: dict[str, Any] = {**_figures(settings, sampled, greedy), **shared}
    for label in mixed_labels(context.config):
        groups_here = [[group for group in groups if group[0].environment == label] for groups in (sampled, greedy)]
        # Among few held-out problems a label may have none.
        if groups_here[0]:
            row |= {f"{label}/{name}": value for name, value in _figures(settings, *groups_here).items()}
    row |= {f"task/{name}": float(value) for name, value in context.task.figures(problems, sampled).items()}
    return Evaluation(row, {"": stored(sampled, greedy)})


def stored(sampled: Sequence[Sequence[Rollout]], greedy: Sequence[Sequence[Rollout]]) -> list[dict[str, Any]]:
    """Return an evaluation's completions as rows for `retrain score`, one for each problem.

    `correct` and `rewards` hold the run's own scores of each prediction. In a mix, the label
    precedes the problem's id. A repeated id gets a number.

    Args:
        sampled: rollouts of each problem.
        greedy: the greedy rollout of each problem; may be empty.
    """
    rows: list[dict[str, Any]] = []
    taken = Counter[str]()
    for index, group in enumerate(sampled):
        first = group[0]
        name = f"{first.environment}/{first.problem_id}" if first.environment else first.problem_id
        taken[name] += 1
        row: dict[str, Any] = {
            "question_id": name if taken[name] == 1 else f"{name}#{taken[name]}",
            "prompt": first.prompt,
            "ground_truth": first.answer,
            "predictions": [rollout.text for rollout in group],
            "lengths": [rollout.length for rollout in group],
            "correct": [bool(rollout.correct) for rollout in group],
            "rewards": [rollout.reward for rollout in group],
        }
        if greedy:
            best = greedy[index][0]
            row["greedy"] = {"prediction": best.text, "length": best.length, "correct": bool(best.correct)}
        rows.append(row)
    return rows


def _figures(
    settings: Eval, sampled: Sequence[Sequence[Rollout]], greedy: Sequence[Sequence[Rollout]]
) -> dict[str, Any]:
    """Return the figures of some problems, from sampled and, if there are any, greedy rollouts."""
    samples, several = settings.samples, [rollout for group in sampled for rollout in group]
    # `correct` is None after a failure, which counts as wrong.
    counts = [sum(bool(rollout.correct) for rollout in group) for group in sampled]
    accuracy, low, high = mean_interval([count / samples for count in counts])
    figures: dict[str, Any] = {
        "accuracy": accuracy,
        "ci_low": low,
        "ci_high": high,
        "avg_tokens": sum(rollout.length for rollout in several) / len(several),
        "truncated": sum(rollout.truncated for rollout in several) / len(several),
        # A count, not a share: one failure of a thousand matters.
        "failed": sum(rollout.reward is None for rollout in several),
        "problems": len(sampled),
        f"avg@{samples}": accuracy,
    }
    if any(rollout.ended for rollout in several):  # in an environment
        figures["turns"] = sum(len(rollout.turns) for rollout in several) / len(several)
    for k in settings.pass_at:
        figures[f"pass@{k}"] = sum(pass_at_k(samples, count, k) for count in counts) / len(counts)
    if greedy:
        figures["greedy_accuracy"] = sum(bool(group[0].correct) for group in greedy) / len(greedy)
    return figures


def _sample(
    context: RunContext, rendered: list[RenderedPrompt], samples: int, temperature: float
) -> list[list[Rollout]]:
    settings = context.config.eval
    seed = derive_seed(settings.seed, "evaluation")
    sampling = context.trained.loaded.sampling(seed, temperature, settings.top_p, settings.top_k)
    max_tokens = settings.max_tokens or context.config.training.max_tokens
    sampled = roll(context, rendered, requests_for(rendered, samples, max_tokens), sampling)
    rollouts = score(context.chat, context.pool, rendered, sampled, max_tokens)
    return [rollouts[i : i + samples] for i in range(0, len(rollouts), samples)]
