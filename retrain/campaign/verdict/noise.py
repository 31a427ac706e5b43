"""Where the differences between seeds come from: the sample of held-out problems, or the runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.analysis import Analysis, Comparison
from retrain.campaign.verdict.results import Results

_MORE_PROBLEMS, _MORE_SEEDS = 4, 4
"""Both about double the cost of what they change in a usual campaign: its evaluations, or its runs."""


def pooled_deviation(compared: Sequence[Comparison]) -> float:
    """Return the standard deviation of a paired difference, pooled over comparisons by their degrees of freedom."""
    dof = sum(comparison.mean.dof for comparison in compared)
    squares = sum(comparison.deviation**2 * comparison.mean.dof for comparison in compared)
    return math.sqrt(squares / dof) if dof else 0.0


def noise_sources(analysis: Analysis) -> str:
    """Return how much of the spread over seeds the sample of problems can explain, and what would reduce it.

    A run's share p of right answers has the variance p (1 - p) / problems from the sample of problems. Of a difference
    it is the sum of two; the pairing of runs removes an unknown part of it, so it is an upper bound.

    Returns:
        A sentence; "" for other outcomes than shares of problems, and without pairs of runs.
    """
    outcome = analysis.first.outcome
    problems = min((cell.problems for table in analysis.main for cell in table.runs if cell.done), default=0)
    tables = {table.task: table for table in analysis.main}
    compared = [
        comparison
        for comparison in analysis.of(outcome)
        if comparison.paired and comparison.starts == 1 and comparison.mean.dof > 0 and comparison.task in tables
    ]
    deviation = pooled_deviation(compared)
    # The mean over evaluations has less of this variance, by how much depends on the runs.
    if not problems or not deviation or outcome.summary == "mean":
        return ""
    variance = fmean(_of_problems(comparison, tables[comparison.task], problems) for comparison in compared)
    sampled = min(math.sqrt(variance), deviation)
    fewer = math.sqrt(deviation**2 - sampled**2 * (1 - 1 / _MORE_PROBLEMS))
    most = max(compared, key=lambda comparison: comparison.count)
    now = deviation * statistics.detectable_effect(most.count, most.size, most.alpha)
    then = deviation * statistics.detectable_effect(most.count + _MORE_SEEDS, most.size, most.alpha)
    return (
        f"of the standard deviation of {deviation:.3f} over seeds, at most {sampled:.3f} is from {problems} held-out "
        f"problems, and the rest from the runs: {_MORE_PROBLEMS} times the problems would bring it to {fewer:.3f} at "
        f"best; {_MORE_SEEDS} more seeds would detect {then:.3f} instead of {now:.3f}"
    )


def _of_problems(comparison: Comparison, table: Results, problems: int) -> float:
    """Return the variance that the sample of problems gives to a difference of two independent shares."""
    rates = [
        fmean(table.cells[label, seed].result or 0.0 for seed in comparison.seeds)
        for label in (comparison.condition, comparison.against)
    ]
    return sum(rate * (1 - rate) for rate in rates) / problems
