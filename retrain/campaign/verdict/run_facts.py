"""Facts about the runs of a table: settings, what differs, environments, commands, and results.csv."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from retrain.campaign.plan.plan_file import extensions, read_plan
from retrain.campaign.verdict.results import SPENT, Cell, Results
from retrain.report.page import Table
from retrain.storage.run_files import flatten, with_current_keys
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
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def what_differs(results: Results) -> dict[str, dict[str, str]]:
    """Return the keys that differ between conditions: key -> label -> value as JSON, `-` if unset.

    Conditions without a started run are left out.
    """
    # One run stands for its condition: a campaign refuses runs of one condition with other settings.
    settings_of = {label: settings(cell.path) for label in results.conditions for cell in results.started(label)[:1]}
    keys = dict.fromkeys(key for values in settings_of.values() for key in values)
    shown = {
        key: {label: json.dumps(values[key]) if key in values else "-" for label, values in settings_of.items()}
        for key in keys
    }
    return {key: values for key, values in shown.items() if len(set(values.values())) > 1}


def measured_differently(changes: Mapping[str, Any], results: Results) -> list[str]:
    """Return the keys among the changes that define the measurement: model, task, held-out problems, sampling.

    The parameters of a task are in a table of its name.
    """
    config = configuration(results)
    tables = [str(config.get("task", {}).get("name", "")).rpartition(".")[2] or "task"]
    # Unset, the limit of training is that of evaluated answers, and so it changes what is measured.
    if config.get("eval", {}).get("max_tokens") is None:
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
    # A run of the campaign's own name would continue the stored run instead of repeating it.
    lines += ["", "# single runs, under other names than the campaign's"]
    for cell in results.runs:
        config, name = str(cell.path / "config.toml"), f"again-{cell.path.parent.name}-{cell.path.name}"
        options = f"--set logging.name={_NAME.sub('-', name)} --set logging.dir=runs"
        lines.append(f"retrain train {shlex.quote(config)} {options}")
    return lines


def row(cell: Cell, threshold: float | None, column: str = "accuracy", sign: int = 1) -> dict[str, Any]:
    """Return a cell as a row of results.csv and results.parquet; missing values are None."""
    step, can_reach = cell.reached(threshold, sign), cell.done and threshold is not None
    needed = (None,) * len(SPENT) if step is None else cell.spent_after(step)
    return {
        **{name: getattr(cell, name) for name in ("condition", "seed", "status", "reason")},
        column: cell.result,
        "area": cell.area,
        "avg_tokens": cell.avg_tokens if cell.done else None,
        "steps": len(cell.spent) - 1,
        **dict(zip(SPENT, cell.total, strict=True)),
        "reached": step is not None if can_reach else None,
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
    # pyarrow is optional: results.csv has the same rows.
    if importlib.util.find_spec("pyarrow") is None:
        return [path]
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), directory / "results.parquet")
    return [path, directory / "results.parquet"]


class AddedFacts(NamedTuple):
    """What an extension of campaigns adds to a report.

    Attributes:
        title: title of the table.
        table: a table; one without rows is not shown.
        remarks: sentences.
        scope: a phrase about what was compared; "" for none.
    """

    title: str
    table: Table
    remarks: Sequence[str]
    scope: str


def added_facts(directory: Path, tables: Sequence[Results]) -> list[AddedFacts]:
    """Return what the extensions add to the report of a campaign."""
    planned = read_plan(directory).model_extra or {}
    return [AddedFacts(**module.reported(planned.get(name, {}), tables)) for name, module in extensions().items()]
