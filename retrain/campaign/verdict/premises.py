"""Premises of a campaign's tasks, checked in the evaluations before training, and the version of the tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from retrain.campaign.plan.plan_file import read_plan
from retrain.campaign.plan.testbed_version import version
from retrain.campaign.verdict.results import Results
from retrain.report.page import Table
from retrain.storage.run_files import read_rows


class Premises(NamedTuple):
    """Premises of all tasks.

    Attributes:
        table: a row for each task: premise, measured values with their bounds, and whether it holds; no rows without.
        remarks: sentences about premises that do not hold or were not measured.
        version: version of the tasks, for a report; "" for other tasks than those of the testbed.
    """

    table: Table
    remarks: Sequence[str]
    version: str


def premises_of(directory: Path, tables: Sequence[Results]) -> Premises:
    """Check the premises of a campaign's tasks in the first evaluation of one run per warm start.

    One run suffices, because before training all runs of a warm start have the same weights.
    """
    known, rows, remarks = read_plan(directory).premises, list[dict[str, str]](), list[str]()
    own = {table.task: table for table in reversed(tables) if table.task}
    tasks = list(dict.fromkeys(table.task for table in tables if table.task))
    for task in tasks:
        checks = _checks(own[task], known[task]["bounds"]) if task in known else []
        remarks += [f"the premise of {task} {word}: {text}" for text, word in checks if word != "holds"]
        words = {word for _, word in checks}
        verdict = "fails" if "does not hold" in words else "holds" if words == {"holds"} else "-"
        measured = "; ".join(text for text, _ in checks) or "-"
        about = _about(known.get(task)) or "-"
        rows.append({"task": task, "premise": about, "measured (bounds)": measured, "verdict": verdict})
    hashes = {task: str(known[task].get("sha256", "")) if task in known else "" for task in tasks}
    return Premises(Table.of(rows if any(task in known for task in tasks) else []), remarks, version(hashes))


def _checks(table: Results, bounds: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return for each warm start and metric its value with the bounds, and "holds" or why it does not."""
    found: list[tuple[str, str]] = []
    for start in sorted({cell.start for cell in table.runs}):
        files = (cell.path / "eval.jsonl" for cell in table.runs if cell.start == start)
        first = next((rows[0] for file in files if (rows := read_rows(file))), {})
        for metric, (low, high) in bounds.items():
            value = float(first.get(metric, "nan"))
            known = "" if math.isnan(value) else f" {value:.3f}"
            name = metric.removeprefix("task/").replace("_", " ") + (f" of start {start}" if start else "")
            word = "holds" if low <= value <= high else "does not hold" if known else "was not measured"
            found.append((f"{name}{known} ({low:g} to {high:g})", word))
    return found


def _about(premise: Any) -> str:
    """Return the first sentence of the task's docstring, up to a colon; "" without a premise."""
    text = premise["about"].partition(":")[0].partition(". ")[0].rstrip(".") if premise else ""
    return text[:1].lower() + text[1:]
