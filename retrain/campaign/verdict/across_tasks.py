"""A campaign with tasks: every comparison on every task, and what they come to together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.campaign.plan.plan_file import Plan, read_plan
from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.analysis import Comparison, Estimate, Summary, compared, corrected, summarize
from retrain.campaign.verdict.results import Cell, Results, read_campaign
from retrain.functional.seeds import derive_seed
from retrain.storage.run_files import read_rows

LEVELS = np.linspace(0.0, 1.0, 51)
"""Accuracies at which performance profiles are read."""


@dataclass(frozen=True)
class PremiseCheck:
    """A figure of a task before training, and the bounds that its premise gives it; NaN if it was not measured."""

    figure: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """The figure is within its bounds."""
        return self.low <= self.value <= self.high


@dataclass(frozen=True)
class Across:
    """A condition over all tasks.

    Attributes:
        iqm: interquartile mean of the final accuracies of all runs on all tasks.
        gain: its difference from the baseline's, over pairs of runs; NaN for the baseline.
        improvement: probability that a run beats one of the baseline on the same task, in the mean over tasks.
        profile: (share of runs above each of LEVELS, in the mean over tasks; low; high), [3, levels].
    """

    iqm: Estimate
    gain: Estimate
    improvement: Estimate
    profile: Any


@dataclass(frozen=True)
class ReportCard:
    """The report card.

    Attributes:
        name, plan: of the campaign.
        tables: results by task.
        checks: of every task's premise.
        summaries: by (task, condition).
        comparisons: by (task, condition), each against the baseline; one family, corrected for all of them.
        across: by condition.
    """

    name: str
    plan: Plan
    tables: Mapping[str, Results]
    checks: Mapping[str, Sequence[PremiseCheck]]
    summaries: Mapping[tuple[str, str], Summary]
    comparisons: Mapping[tuple[str, str], Comparison]
    across: Mapping[str, Across]

    @property
    def first(self) -> Results:
        """The table of the first task: conditions, baseline and seeds are those of all."""
        return next(iter(self.tables.values()))

    @property
    def lost(self) -> list[tuple[str, Cell]]:
        """Runs without a result, with their task."""
        return [(task, cell) for task, table in self.tables.items() for cell in table.lost]


def report_card(directory: Path) -> ReportCard:
    """The card of a campaign with tasks, finished or not; equal files give equal numbers."""
    plan = read_plan(directory)
    tables = {task: read_campaign(directory, task) for task in plan.tasks}
    first = next(iter(tables.values()))
    others = [one for one in first.conditions if one != first.baseline]
    places = [(task, one) for one in others for task in tables]
    found = [compared(tables[task], (one, first.baseline), "tasks", len(places)) for task, one in places]
    return ReportCard(
        name=directory.resolve().name,
        plan=plan,
        tables=tables,
        checks={task: _checks(plan, task, tables[task]) for task in tables},
        summaries={(task, one): summarize(tables[task], one) for task in tables for one in first.conditions},
        comparisons=dict(zip(places, corrected(found), strict=True)),
        across={one: _across(list(tables.values()), one, first.baseline) for one in first.conditions},
    )


def _checks(plan: Plan, task: str, table: Results) -> list[PremiseCheck]:
    """Of the first evaluation of the first run that has one: before training all runs of a task are the same."""
    bounds = plan.premises[task]["bounds"] if task in plan.premises else {}
    rows = next((rows for cell in table.runs if (rows := read_rows(cell.path / "eval.jsonl"))), [{}])
    return [PremiseCheck(name, float(rows[0].get(name, "nan")), low, high) for name, (low, high) in bounds.items()]


def _across(tables: Sequence[Results], condition: str, baseline: str) -> Across:
    own = [[[cell.accuracy] for cell in table.done(condition).values()] for table in tables]
    pairs = [[[a.accuracy, b.accuracy] for a, b in table.pairs(condition, baseline)] for table in tables]
    pairs = [pair for pair in pairs if pair and condition != baseline]

    def estimated(strata: Sequence[Any], statistic: Any, name: str, **of: Any) -> Any:
        return statistics.stratified(strata, statistic, derive_seed(0, name, condition, baseline), **of)

    return Across(
        iqm=Estimate(*map(float, estimated(own, lambda s: _iqm(s, 0), "iqm", used=0.5))),
        gain=Estimate(*map(float, estimated(pairs, gain, "gain", used=0.5))),
        improvement=Estimate(*map(float, np.clip(estimated(pairs, statistics.wins, "wins", pairwise=True), 0, 1))),
        profile=np.clip(estimated(own, _profile, "profile"), 0, 1),
    )


def gain(strata: Sequence[Any]) -> Any:
    """Interquartile mean of the first column's runs less that of the second's, for [draws, n, 2] of each task."""
    return _iqm(strata, 0) - _iqm(strata, 1)


def _iqm(strata: Sequence[Any], column: int) -> Any:
    return statistics.iqm(np.concatenate([stratum[..., column] for stratum in strata], axis=-1))


def _profile(strata: Sequence[Any]) -> Any:
    """[draws, levels]"""
    return np.mean([(stratum > LEVELS).mean(axis=-2) for stratum in strata], axis=0)
