"""Declared looks: which conditions of a campaign have ended, and how many seeds a design is expected to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.campaign.plan.plan_file import Plan
from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.analysis import analyze
from retrain.campaign.verdict.results import ALL_TASKS
from retrain.campaign.verdict.run_reader import read_campaign_tables
from retrain.campaign.verdict.sentences import short
from retrain.campaign.verdict.statistics import LEVEL, SequentialFamily

_SIGNS = 500
"""Sign vectors of a simulated campaign; more would not change its mean number of seeds by a tenth."""


@dataclass(frozen=True)
class LookState:
    """What the stored runs of a campaign decide.

    Attributes:
        passed: number of looks that are complete and tested.
        stopped: label of a condition in plan.json -> number of seeds at which it stopped, and its verdict in words.
    """

    passed: int
    stopped: Mapping[str, tuple[int, str]]


def look_state(directory: Path, plan: Plan) -> LookState:
    """Return the looks of a campaign that its stored runs complete, and the conditions that have ended there.

    The result depends on the stored runs and the plan only. A condition has ended when every comparison has in which it
    takes part, of every outcome. Its words are those of its comparison with the baseline in the first outcome.
    """
    tables = read_campaign_tables(directory)
    analysis = analyze(tables)
    first = tables[0]
    words: dict[tuple[str, str], str] = {}
    # A condition may be compared with another before it is compared with the baseline.
    for comparison in sorted(analysis.of(first.outcome), key=lambda each: each.against != first.baseline):
        words.setdefault((comparison.task, comparison.condition), short(comparison))
    stopped: dict[str, tuple[int, str]] = {}
    for (task, label), seeds in analysis.stopped.items():
        word = words.get((task, label)) or words.get((ALL_TASKS, label), "every comparison has ended")
        stopped[f"{task}: {label}" if task else label] = seeds, word
    return LookState(analysis.passed, stopped)


def expected_seeds(
    sizes: Sequence[int],
    comparisons: int,
    alpha: float = LEVEL,
    effect: float = 0.0,
    margin: float | None = None,
    tables: int = 300,
) -> tuple[float, float]:
    """Return the mean numbers of seeds of a compared condition and of the baseline, simulated.

    Args:
        sizes: numbers of seeds of the looks; the last is that of the campaign.
        comparisons: number of conditions that are compared with the baseline.
        alpha: family-wise level.
        effect: true difference of each from the baseline, in standard deviations of a paired difference.
        margin: largest difference that does not matter, in the same unit.
        tables: number of simulated campaigns.
    """
    rng = np.random.default_rng([*sizes, comparisons])
    levels = statistics.nominal_levels(tuple(sizes), alpha)
    spent = statistics.spending(sizes, alpha)
    condition_seeds = baseline_seeds = 0.0
    for _ in range(tables):
        noise = rng.normal(size=(comparisons + 1, sizes[-1]))
        # Comparisons share the noise of the baseline; each difference has the deviation 1.
        paired = (noise[1:] - noise[0]) / 2**0.5 + effect
        family = SequentialFamily(paired, sizes, [0.0] * comparisons, range(sizes[-1]), alpha, _SIGNS)
        remaining = [*range(comparisons)]
        equal: dict[int, int] = {}
        for number, size in enumerate(sizes):
            p = family.test(number, remaining, equal)
            ended = {index for index in remaining if p.get(index, 1.0) <= spent[number]}
            if margin is not None:
                means = {index: statistics.mean_of(paired[index, :size].tolist()) for index in remaining}
                intervals = {index: mean.interval(levels[number]) for index, mean in means.items()}
                # An interval inside of the margin implies both of its tests, but for Holm's correction.
                inside = {index for index, each in intervals.items() if -margin < each.low and each.high < margin}
                equal |= dict.fromkeys(inside - ended, number)
                ended |= inside
            # At the last look everything ends.
            stays = [index for index in remaining if index not in ended] if size < sizes[-1] else []
            condition_seeds += size * (len(remaining) - len(stays)) / comparisons
            remaining = stays
            if not remaining:
                baseline_seeds += size
                break
    return condition_seeds / tables, baseline_seeds / tables
