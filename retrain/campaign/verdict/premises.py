"""Premises of a campaign's tasks, checked in the evaluations before training, and the version of the tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.campaign.plan.plan_file import read_plan
from retrain.campaign.plan.testbed_version import version
from retrain.campaign.verdict.results import Results
from retrain.report.page import Table
from retrain.storage.run_files import read_rows


@dataclass(frozen=True)
class PremiseCheck:
    """A metric of a task before training, with the bounds of the task's premise.

    Attributes:
        task: the task.
        figure: name of the metric.
        start: index of the warm start.
        value: measured value; NaN if it was not measured.
        low, high: bounds of the premise.
    """

    task: str
    figure: str
    start: int
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """True if the value is within its bounds."""
        return self.low <= self.value <= self.high

    def __str__(self) -> str:
        name = self.figure.removeprefix("task/").replace("_", " ") + (f" of start {self.start}" if self.start else "")
        return f"{name}{'' if math.isnan(self.value) else f' {self.value:.3f}'} ({self.low:g} to {self.high:g})"


@dataclass(frozen=True)
class Premises:
    """Premises of all tasks.

    Attributes:
        about: task -> its premise in words; "" without one.
        checks: the measured premises.
        version: version of the tasks, for a report; "" for other tasks than those of the testbed.
    """

    about: Mapping[str, str]
    checks: Sequence[PremiseCheck]
    version: str

    @property
    def remarks(self) -> list[str]:
        """Sentences about premises that do not hold or were not measured."""
        broken = [one for one in self.checks if not one.holds]
        words = {True: "was not measured", False: "does not hold"}
        return [f"the premise of {one.task} {words[math.isnan(one.value)]}: {one}" for one in broken]

    @property
    def table(self) -> Table:
        """A row for each task: premise, measured values with their bounds, and whether it holds; no rows without."""
        return Table.of([self._row(task, about) for task, about in self.about.items()] if self.checks else [])

    def _row(self, task: str, about: str) -> dict[str, str]:
        checks = [one for one in self.checks if one.task == task]
        verdict = "fails" if any(not one.holds and not math.isnan(one.value) for one in checks) else "-"
        verdict = "holds" if checks and all(one.holds for one in checks) else verdict
        measured = "; ".join(map(str, checks)) or "-"
        return {"task": task, "premise": about or "-", "measured (bounds)": measured, "verdict": verdict}


def premises_of(directory: Path, tables: Sequence[Results]) -> Premises:
    """Check the premises of a campaign's tasks in the first evaluation of one run per warm start.

    One run suffices, because before training all runs of a warm start have the same weights.
    """
    plan = read_plan(directory)
    checks = [one for table in tables if table.task in plan.premises for one in _checks(table, plan.premises)]
    known = {table.task: plan.premises.get(table.task) for table in tables if table.task}
    found = version({task: str(premise.get("sha256", "")) if premise else "" for task, premise in known.items()})
    return Premises({task: _about(premise) for task, premise in known.items()}, checks, found)


def _checks(table: Results, premises: Mapping[str, Any]) -> list[PremiseCheck]:
    bounds, found = premises[table.task]["bounds"], list[PremiseCheck]()
    for start in sorted({cell.start for cell in table.runs}):
        files = (cell.path / "eval.jsonl" for cell in table.runs if cell.start == start)
        first = next((rows[0] for file in files if (rows := read_rows(file))), {})
        found += [
            PremiseCheck(table.task, name, start, float(first.get(name, "nan")), low, high)
            for name, (low, high) in bounds.items()
        ]
    return found


def _about(premise: Any) -> str:
    """Return the first sentence of the task's docstring, up to a colon; "" without a premise."""
    text = premise["about"].partition(":")[0].partition(". ")[0].rstrip(".") if premise else ""
    return text[:1].lower() + text[1:]
