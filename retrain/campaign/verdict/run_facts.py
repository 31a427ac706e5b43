"""Facts about the runs of a table: settings, what differs, environments, commands, premises, and results.csv."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from retrain.campaign.plan.plan_file import read_plan
from retrain.campaign.plan.testbed_version import version
from retrain.campaign.verdict.results import SPENT, Cell, Results
from retrain.report.page import Table
from retrain.storage.run_files import flatten, read_rows, with_current_keys
from retrain.system.files import staged
from retrain.system.masking import masked
from retrain.system.records import read_json

_FREE = ("training.seed", "logging", "checkpoint", "components")
"""Keys that may differ between the runs of a condition, or that follow from others."""
_MEASURING = ("model.path", "task", "tasks", "environment", "environments", "rewards", "eval")
"""Sections and keys that define what is measured; in `eval`, all but the number of steps between evaluations."""
_NOT_MEASURING = ("eval.every",)
_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def configuration(results: Results) -> dict[str, Any]:
    """Return the resolved configuration of the baseline's first run that was started; empty without one."""
    started = results.started(results.baseline)
    return read_json(started[0].path / "config.resolved.json") if started else {}


def settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run apart from its seed, dotted key -> value; secrets are masked."""
    leaves = flatten(masked(with_current_keys(read_json(run / "config.resolved.json"))))
    return {key: value for key, value in leaves if not _under(key, _FREE)}


def _under(key: str, sections: Sequence[str]) -> bool:
    return any(f"{key}.".startswith(f"{one}.") for one in sections)


def what_differs(results: Results) -> dict[str, dict[str, str]]:
    """Return the keys that differ between conditions: key -> label -> value as JSON, `-` if unset.

    Conditions without a started run are left out.
    """
    found = {one: settings(cell.path) for one in results.conditions for cell in results.started(one)[:1]}
    keys = dict.fromkeys(key for values in found.values() for key in values)
    shown = {
        key: {label: json.dumps(values[key]) if key in values else "-" for label, values in found.items()}
        for key in keys
    }
    return {key: values for key, values in shown.items() if len(set(values.values())) > 1}


def measured_differently(changes: Mapping[str, Any], results: Results) -> list[str]:
    """Return the keys among the changes that define the measurement: model, task, held-out problems, sampling.

    The parameters of a task are in a table of its name.
    """
    config = configuration(results)
    tables = [str(config.get("task", {}).get("name", "")).rpartition(".")[2] or "task"]
    if config.get("eval", {}).get("max_tokens") is None:  # then training's limit is that of evaluated answers
        tables.append("training.max_tokens")
    return [key for key in changes if _under(key, (*_MEASURING, *tables)) and not _under(key, _NOT_MEASURING)]


def environments(results: Results) -> dict[str, dict[str, int]]:
    """Count the runs by each fact about machines and packages: fact -> value -> runs, most frequent first."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for cell in results.cells.values():
        facts = dict(flatten(read_json(cell.path / "environment.json"))) if cell.status != "unreadable" else {}
        if cell.host:
            facts["host"] = cell.host
        for key, value in facts.items():
            counts[key][value if isinstance(value, str) else json.dumps(value)] += 1
    return {key: dict(values.most_common()) for key, values in counts.items()}


def campaign_commands(directory: Path, results: Results) -> list[str]:
    """Return the commands that repeat the campaign, and each of its runs separately."""
    plan = read_plan(directory)
    changed = [part for text in plan.overrides for part in ("--set", text)]
    again = shlex.join(["retrain", "campaign", plan.file or str(directory / "campaign.toml"), *changed])
    lines = ["# the whole campaign", again, f"retrain report {shlex.quote(str(directory))}"]
    lines += ["", "# single runs, under other names than the campaign's"]
    for cell in results.runs:
        config, name = str(cell.path / "config.toml"), f"again-{cell.path.parent.name}-{cell.path.name}"
        options = f"--set logging.name={_NAME.sub('-', name)} --set logging.dir=runs"
        lines.append(f"retrain train {shlex.quote(config)} {options}")
    return lines


def row(cell: Cell, threshold: float | None, column: str = "accuracy", sign: int = 1) -> dict[str, Any]:
    """Return a cell as a row of results.csv and results.parquet; missing values are None."""
    step, known = cell.reached(threshold, sign), cell.done and threshold is not None
    needed = (None,) * len(SPENT) if step is None else cell.spent_after(step)
    return {
        **{name: getattr(cell, name) for name in ("condition", "seed", "status", "reason")},
        column: cell.result,
        "area": cell.area,
        "avg_tokens": cell.avg_tokens if cell.done else None,
        "steps": len(cell.spent) - 1,
        **dict(zip(SPENT, cell.total, strict=True)),
        "reached": step is not None if known else None,
        "steps_to_threshold": step,
        **{f"{cost}_to_threshold": value for cost, value in zip(SPENT, needed, strict=True)},
        "host": cell.host,
        "attempts": cell.attempts,
        "path": str(cell.path),
    }


def write_tables(tables: Sequence[Results], directory: Path) -> list[Path]:
    """Write results.csv, and results.parquet if pyarrow is installed, with one row per run, including failed ones.

    Args:
        tables: the table of each outcome; those after the first add a column.
        directory: folder of the files.
    Returns:
        Paths of the files.
    """
    first, *others = tables
    rows = [row(cell, first.threshold, first.outcome.column, first.outcome.sign) for cell in first.runs]
    for other in others:
        for line, cell in zip(rows, other.runs, strict=True):
            line.setdefault(other.outcome.column, cell.result)
    path = directory / "results.csv"
    with staged(path) as stage, stage.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0] if rows else (), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if importlib.util.find_spec("pyarrow") is None:
        return [path]
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), directory / "results.parquet")
    return [path, directory / "results.parquet"]


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
