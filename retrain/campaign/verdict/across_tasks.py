"""A campaign with tasks: every comparison on every task, and over all tasks together."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from retrain.campaign.plan.declaration import Declaration, declaration
from retrain.campaign.plan.plan_file import read_plan
from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.analysis import Comparison, Estimate, Summary, compare, compared, corrected, summarize
from retrain.campaign.verdict.results import Cell, Results, read_campaign, table
from retrain.functional.seeds import derive_seed
from retrain.storage.run_files import read_rows

LEVELS = np.linspace(0.0, 1.0, 51)
"""Accuracy thresholds of performance profiles."""


@dataclass(frozen=True)
class PremiseCheck:
    """A metric of a task before training, with the bounds of the task's premise.

    Attributes:
        figure: name of the metric.
        start: index of the warm start.
        value: measured value; NaN if it was not measured.
        low, high: bounds of the premise.
    """

    figure: str
    start: int
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """True if the value is within its bounds."""
        return self.low <= self.value <= self.high


@dataclass(frozen=True)
class Across:
    """A condition over all tasks.

    Attributes:
        iqm: interquartile mean of the final accuracies of all runs on all tasks.
        gain: difference of this mean from the baseline's, over pairs of runs; NaN for the baseline.
        improvement: probability that a run beats one of the baseline on the same task, averaged over tasks.
        profile: [3, levels]: share of runs above each of LEVELS, averaged over tasks, and its interval (low, high).
    """

    iqm: Estimate
    gain: Estimate
    improvement: Estimate
    profile: Any


@dataclass(frozen=True)
class ReportCard:
    """Results of a campaign with tasks.

    Attributes:
        name: name of the campaign.
        alpha: significance level of its tests.
        premises: task -> its premise, from plan.json.
        tables: task -> its results.
        checks: task -> the checks of its premise.
        summaries: (task, condition) -> summary.
        comparisons: (task, condition) -> comparison with the baseline. Those of the controls are one family and those
            of the other conditions another, except a declared one.
        pooled: condition -> comparison with the baseline of the means over tasks, in families of the same conditions.
        across: condition -> estimates over all tasks.
        declared: declaration of the claim, which may be late; None without one.
        controls: conditions with a known result.
    """

    name: str
    alpha: float
    premises: Mapping[str, Mapping[str, Any]]
    tables: Mapping[str, Results]
    checks: Mapping[str, Sequence[PremiseCheck]]
    summaries: Mapping[tuple[str, str], Summary]
    comparisons: Mapping[tuple[str, str], Comparison]
    pooled: Mapping[str, Comparison]
    across: Mapping[str, Across]
    declared: Declaration | None = None
    controls: tuple[str, ...] = ()

    @property
    def first(self) -> Results:
        """Results of the first task; conditions, baseline and seeds are the same for all tasks."""
        return next(iter(self.tables.values()))

    @property
    def lost(self) -> list[tuple[str, Cell]]:
        """Runs without a result, with their task."""
        return [(task, cell) for task, table in self.tables.items() for cell in table.lost]


def report_card(directory: Path) -> ReportCard:
    """Compute the report card of a campaign with tasks, finished or not. The result is deterministic."""
    plan = read_plan(directory)
    tables = {task: read_campaign(directory, task) for task in plan.tasks}
    declared = declaration(plan)
    claim = (plan.claim, plan.primary) if plan.claim and plan.primary and declared and not declared.late else None
    card = card_of(directory.resolve().name, tables, plan.premises, claim, plan.controls)
    return replace(card, declared=declared)


def card_of(
    name: str,
    tables: Mapping[str, Results],
    premises: Mapping[str, Mapping[str, Any]],
    claim: tuple[str, str] | None = None,
    controls: Collection[str] = (),
) -> ReportCard:
    """Compute the report card of results that share their conditions and their baseline.

    Args:
        name: name of the campaign.
        tables: task -> its results.
        premises: task -> its premise.
        claim: (task, condition) of the declared comparison, which is tested alone and not in a family.
        controls: conditions with a known result, which form families of their own.
    """
    first = next(iter(tables.values()))
    others = [one for one in first.conditions if one != first.baseline]
    every = [(task, one) for one in others for task in tables]
    sides = [[one for one in others if one not in controls], [one for one in others if one in controls]]
    in_families = [[place for place in every if place != claim and place[1] in side] for side in sides]
    found: dict[tuple[str, str], Comparison] = {}
    for family, places in [("primary", [claim] if claim else []), *(("tasks", places) for places in in_families)]:
        tested = [compared(tables[task], (one, first.baseline), family, len(places)) for task, one in places]
        found |= zip(places, corrected(tested), strict=True)
    mean = _mean_over_tasks(tables)
    by_condition = {
        found.condition: found
        for side in sides
        for found in compare(mean, [(one, first.baseline) for one in side], "pooled")
    }
    return ReportCard(
        name=name,
        alpha=first.alpha,
        premises=premises,
        tables=tables,
        checks={task: _checks(premises, task, tables[task]) for task in tables},
        summaries={(task, one): summarize(tables[task], one) for task in tables for one in first.conditions},
        comparisons={place: found[place] for place in every},
        pooled={one: by_condition[one] for one in others},
        across={one: _across(list(tables.values()), one, first.baseline) for one in first.conditions},
        controls=tuple(controls),
    )


def _mean_over_tasks(tables: Mapping[str, Results]) -> Results:
    """Average the results of each seed over tasks; a seed without a result on every task is "missing"."""
    first, found = next(iter(tables.values())), list[Cell]()
    for label in first.conditions:
        for seed in first.seeds:
            cells = [table.cells.get((label, seed)) for table in tables.values()]
            results = [cell.accuracy for cell in cells if cell and cell.accuracy is not None]
            done, place = len(results) == len(tables), next((cell.path for cell in cells if cell), Path())
            curve = ((0, fmean(results)),) if done else ()
            start = next((cell.start for cell in cells if cell), 0)
            found.append(Cell(label, seed, place, "done" if done else "missing", curve=curve, start=start))
    return table("all tasks", found, baseline=first.baseline, alpha=first.alpha, metric=first.metric)


def _checks(premises: Mapping[str, Mapping[str, Any]], task: str, table: Results) -> list[PremiseCheck]:
    """Check a task's premise in the first evaluation of one run per warm start.

    One run suffices, because before training all runs of a warm start have the same weights.
    """
    bounds = premises[task]["bounds"] if task in premises else {}
    found: list[PremiseCheck] = []
    for start in sorted({cell.start for cell in table.runs}):
        files = (cell.path / "eval.jsonl" for cell in table.runs if cell.start == start)
        first = next((rows[0] for file in files if (rows := read_rows(file))), {})
        values = {name: float(first.get(name, "nan")) for name in bounds}
        found += [PremiseCheck(name, start, values[name], low, high) for name, (low, high) in bounds.items()]
    return found


def _across(tables: Sequence[Results], condition: str, baseline: str) -> Across:
    own = [[(cell,) for cell in table.done(condition).values()] for table in tables]
    pairs = [table.pairs(condition, baseline) if condition != baseline else [] for table in tables]
    pairs = [pair for pair in pairs if pair]
    by_start = any(table.starts > 1 for table in tables)

    def estimated(runs: Sequence[Sequence[tuple[Cell, ...]]], statistic: Any, name: str, **of: Any) -> Any:
        strata = [[[cell.accuracy for cell in row] for row in task] for task in runs]
        seed = derive_seed(0, name, condition, baseline)
        if not by_start:
            return statistics.stratified(strata, statistic, seed, **of)
        starts = [[row[0].start for row in task] for task in runs]
        return statistics.stratified_by_start(strata, starts, statistic, seed)

    return Across(
        iqm=Estimate(*map(float, estimated(own, lambda s: _iqm(s, 0), "iqm", used=0.5))),
        gain=Estimate(*map(float, estimated(pairs, gain, "gain", used=0.5))),
        improvement=Estimate(*map(float, np.clip(estimated(pairs, statistics.wins, "wins", pairwise=True), 0, 1))),
        profile=np.clip(estimated(own, _profile, "profile"), 0, 1),
    )


def gain(strata: Sequence[Any]) -> Any:
    """Return the difference of interquartile means between the columns; for each task [draws, n, 2] -> [draws]."""
    return _iqm(strata, 0) - _iqm(strata, 1)


def _iqm(strata: Sequence[Any], column: int) -> Any:
    return statistics.iqm(np.concatenate([stratum[..., column] for stratum in strata], axis=-1))


def _profile(strata: Sequence[Any]) -> Any:
    """Return the performance profile averaged over tasks: [draws, levels]."""
    return np.mean([(stratum > LEVELS).mean(axis=-2) for stratum in strata], axis=0)
