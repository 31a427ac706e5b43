"""Do the token rewards of PRIME's reward models find the first wrong step? For runs on the task `chain`.

    python benchmarks/evidence/first_mistake.py runs/claim-prime/cells/prime*/s*

The untrained policy answers held-out problems, four times each, and the trained reward model of every run scores these
answers. The score of a step is the sum of its tokens' rewards. AUC: how often the first wrong step of an answer scores
lower than a right step, over all pairs of them; `within`: the same over pairs of one answer, whose right steps all come
before; `lowest`: the share of answers with a mistake whose lowest step, the first wrong one or before it, is the wrong
one, with the chance of it. With several runs, means and 95% t intervals over runs.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from scipy.stats import rankdata, t

from retrain.functional.seeds import derive_seed
from retrain.run.collectors.rollouts import requests_for, score
from retrain.run.episodes import EpisodeRunner
from retrain.run.reopen import reopen
from retrain.run.run_context import RunContext
from retrain.tools.prm_scores import ScoredRow, score_file
from retrain.types import Problem, Rollout, Sampling

PROBLEMS, SAMPLES = 256, 4


class Steps(NamedTuple):
    """Scores of an answer's right steps before the first wrong one, and of that; None if there is none."""

    right: list[float]
    wrong: float | None


def answers(context: RunContext) -> Iterator[tuple[Problem, Rollout]]:
    """What the policy answers to held-out problems."""
    posed = [(problem, context.chat.prompt(problem.prompt)) for problem in context.task.heldout(PROBLEMS)]
    sampling = Sampling(stop_ids=context.trained.loaded.stop_ids, seed=derive_seed(0, "first mistake"))
    most = context.config.training.max_tokens
    found = EpisodeRunner(context.sampler, context.chat, sampling).roll(posed, requests_for(posed, SAMPLES, most))
    for rollout in score(context.chat, context.pool, posed, found, most):
        yield posed[rollout.group][0], rollout


def steps(text: str, mistake: Sequence[tuple[int, int]], row: ScoredRow) -> Steps:
    """The scores of the steps of an answer. A step is a line that begins with "+"."""
    ends = list(accumulate(len(token) for token, _ in row.rewards))
    right, place = list[float](), 0
    for line in text.splitlines(keepends=True):
        start, place = place, place + len(line)
        if not line.startswith("+"):
            break
        value = sum(reward for end, (_, reward) in zip(ends, row.rewards, strict=True) if start < end <= place)
        if mistake and start <= mistake[0][0] < place:
            return Steps(right, value)
        right.append(value)
    return Steps(right, None)


def auc(low: Sequence[float], high: Sequence[float]) -> float:
    """P(one of `low` < one of `high`), ties half."""
    ranks = rankdata([*high, *low])[: len(high)]
    return float((ranks.sum() - len(high) * (len(high) + 1) / 2) / (len(high) * len(low)))


def figures(found: Sequence[Steps]) -> dict[str, float]:
    """AUC over all pairs, within answers, and how often the lowest step is the wrong one."""
    lost = [(one.right, one.wrong) for one in found if one.wrong is not None]
    compared = [(right, wrong) for right, wrong in lost if right]
    return {
        "auc": auc([wrong for _, wrong in lost], [value for one in found for value in one.right]),
        "within": statistics.fmean(auc([wrong], right) for right, wrong in compared),
        "lowest": statistics.fmean(wrong < min(right) for right, wrong in compared),
        "chance": statistics.fmean(1 / (len(right) + 1) for right, _ in compared),
        "mistakes": len(lost),
    }


def main(runs: Sequence[Path]) -> None:
    """Print a row of JSON for every run, then means over the runs of each condition."""
    context = reopen(runs[0], (), lambda event, details: None, parts="initial")
    try:
        asked = list(answers(context))
        mistakes = [context.task.spans(problem, rollout.text)["mistake"] for problem, rollout in asked]
    finally:
        context.close()
    conditions: dict[str, list[dict[str, float]]] = {}
    with TemporaryDirectory() as folder:
        file = Path(folder) / "answers.jsonl"
        rows = [{"prompt": p.prompt, "solution": r.text, "correct": bool(r.correct)} for p, r in asked]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for run in runs:
            scored = score_file(file, str(run / "model" / "process_rewards"))
            every = zip(asked, mistakes, scored, strict=True)
            row = figures([steps(rollout.text, spans, one) for (_, rollout), spans, one in every])
            print(json.dumps({"run": str(run), **row}), flush=True)
            conditions.setdefault(run.parent.name, []).append(row)
    for condition, found in conditions.items():
        for name in ("auc", "within", "lowest", "chance"):
            values = [row[name] for row in found]
            print(f"{condition}: {name} {statistics.fmean(values):.3f}{_interval(values)}, {len(values)} runs")


def _interval(values: Sequence[float]) -> str:
    if len(values) < 2:
        return ""
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f" [{statistics.fmean(values) - half:.3f}, {statistics.fmean(values) + half:.3f}]"


if __name__ == "__main__":
    main([Path(one) for one in sys.argv[1:]])
