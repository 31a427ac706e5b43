"""The results of a campaign's runs and where they come from: one `Cell` per condition and seed, read from files.

A failed, missing or unfinished cell stays in the table with its reason; it has no result.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import isfinite
from pathlib import Path
from typing import Any

from retrain.campaign.plan.plan_file import read_outcome, read_plan
from retrain.errors import StorageError
from retrain.storage.run_files import flatten, read_rows, understood
from retrain.system.files import staged
from retrain.system.masking import masked
from retrain.system.records import read_json

SPENT = ("rollouts", "tokens", "seconds")
_SPENT_KEYS = ("rollout/completions", "tokens/sampled", "time/step_s")
_EVALUATED = ("accuracy", "avg_tokens")


_FREE = ("training.seed", "logging", "checkpoint", "components")
"""Keys that may differ between the runs of a condition, or that follow from others."""

_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Cell:
    """One run: a condition with a seed.

    Attributes:
        condition, seed, path: which run, and its directory.
        status: "done", "failed", "missing" (never started), "unfinished" or "unreadable" (its files are damaged).
        reason: why there is no result, in words; empty when done.
        curve: (step, held-out accuracy) of every evaluation, in order.
        avg_tokens: mean length of a held-out completion at the last evaluation.
        spent: rollouts, tokens and seconds used up after 0, 1, 2, ... steps.
        host, attempts: where it ran, and how often it was started.
    """

    condition: str
    seed: int
    path: Path
    status: str
    reason: str = ""
    curve: tuple[tuple[int, float], ...] = ()
    avg_tokens: float | None = None
    spent: tuple[tuple[float, float, float], ...] = ((0.0, 0.0, 0.0),)
    host: str = ""
    attempts: int | None = None

    @property
    def done(self) -> bool:
        """It finished and was evaluated; only such cells enter statistics."""
        return self.status == "done"

    @property
    def accuracy(self) -> float | None:
        """Held-out accuracy of the last evaluation; None unless done."""
        return self.curve[-1][1] if self.done else None

    @property
    def area(self) -> float | None:
        """Area under the learning curve by trapezoids, over the steps: the mean accuracy on the way. None unless done.

        With one evaluation it is that accuracy.
        """
        if not self.done:
            return None
        if len(self.curve) == 1:
            return self.curve[0][1]
        area = sum((b - a) * (low + high) / 2 for (a, low), (b, high) in pairwise(self.curve))
        return area / (self.curve[-1][0] - self.curve[0][0])

    @property
    def total(self) -> tuple[float, float, float]:
        """Rollouts, tokens and seconds of the whole run; evaluation is not in them."""
        return self.spent[-1]

    def reached(self, threshold: float) -> int | None:
        """Steps done at the first evaluation of at least `threshold`; None if there is none (the run is censored)."""
        return next((step for step, accuracy in self.curve if accuracy >= threshold), None)

    def spent_after(self, step: int) -> tuple[float, float, float]:
        """Rollouts, tokens and seconds of the first `step` steps."""
        return self.spent[min(step, len(self.spent) - 1)]


@dataclass(frozen=True)
class Results:
    """The table of a campaign.

    Attributes:
        name: of the campaign.
        conditions: labels, in the order of the plan.
        baseline: the condition that all are compared with.
        seeds: in ascending order.
        cells: by (condition, seed); every planned pair is there.
        threshold: the accuracy that "steps to threshold" counts to; None if no accuracy makes sense.
        alpha: level of each family of comparisons.
        ladder: pairs (condition, against) in which the first adds something to the second.
        primary: the condition whose comparison with the baseline was declared to be the question.
    """

    name: str
    conditions: tuple[str, ...]
    baseline: str
    seeds: tuple[int, ...]
    cells: Mapping[tuple[str, int], Cell]
    threshold: float | None = None
    alpha: float = 0.05
    ladder: tuple[tuple[str, str], ...] = ()
    primary: str | None = None

    def of(self, condition: str) -> list[Cell]:
        """The condition's cells, by seed."""
        return [cell for seed in self.seeds if (cell := self.cells.get((condition, seed)))]

    def done(self, condition: str) -> dict[int, Cell]:
        """The condition's finished cells, by seed."""
        return {cell.seed: cell for cell in self.of(condition) if cell.done}

    def started(self, condition: str) -> list[Cell]:
        """The condition's cells with a resolved configuration, the finished ones first."""
        readable = [cell for cell in self.of(condition) if cell.status != "unreadable"]
        found = [cell for cell in readable if (cell.path / "config.resolved.json").is_file()]
        return sorted(found, key=lambda cell: not cell.done)

    def pairs(self, condition: str, against: str) -> list[tuple[Cell, Cell]]:
        """The finished cells of both conditions with the same seed, by seed."""
        left, right = self.done(condition), self.done(against)
        return [(left[seed], right[seed]) for seed in left if seed in right]

    @property
    def runs(self) -> list[Cell]:
        """All cells, by condition and seed."""
        return [cell for condition in self.conditions for cell in self.of(condition)]

    @property
    def lost(self) -> list[Cell]:
        """Cells that failed, are missing or unfinished."""
        return [cell for cell in self.runs if not cell.done]


def read_campaign(directory: Path, task: str = "") -> Results:
    """The table of a campaign directory.

    Args:
        task: of a campaign with tasks, the one to read; without it every condition on every task is one of its own.
    Raises:
        ConfigError: there is no campaign at this path. StorageError: its plan cannot be read.
    """
    plan, name = read_plan(directory), directory.resolve().name
    cells = [
        read_cell(directory / job.path, job.method if task else job.condition, job.seed, job.max_steps)
        for job in plan.cells
        if task in ("", job.task)
    ]
    if plan.tasks and not task:
        return table(name, cells, alpha=plan.alpha)
    facts = plan.model_dump(include={"baseline", "threshold", "alpha", "ladder", "primary"})
    return table(f"{name}: {task}" if task else name, cells, **facts)


def table(name: str, cells: Sequence[Cell], *, baseline: str | None = None, **more: Any) -> Results:
    """Results from cells in their order; the baseline is the first condition, the threshold nine tenths of its way.

    The way goes from its mean first accuracy to its mean last one. Without finished runs or improvement there is no
    threshold.
    """
    conditions = tuple(dict.fromkeys(cell.condition for cell in cells))
    seeds = tuple(sorted({cell.seed for cell in cells}))
    by_place = {(cell.condition, cell.seed): cell for cell in cells}
    results = Results(name, conditions, baseline or conditions[0], seeds, by_place, **more)
    curves = [cell.curve for cell in results.done(results.baseline).values()]
    if results.threshold is not None or not curves:
        return results
    first, last = (sum(curve[end][1] for curve in curves) / len(curves) for end in (0, -1))
    return replace(results, threshold=first + 0.9 * (last - first)) if last > first else results


def read_cell(path: Path, condition: str, seed: int, max_steps: int | None = None) -> Cell:
    """The cell of a run directory. A run whose files are damaged has the status "unreadable".

    How the campaign says that it ended counts; without an outcome.json, its own status.json.

    Args:
        max_steps: how many steps the run was to make; None: as its own configuration says.
    """
    cell = Cell(condition, seed, path, "unreadable")
    try:
        with understood(path):
            return _read(cell, max_steps)
    except StorageError as error:
        return replace(cell, reason=str(error))


def _read(cell: Cell, max_steps: int | None) -> Cell:
    path, outcome = cell.path, read_outcome(cell.path)
    config, _ = (read_json(path / name) for name in ("config.resolved.json", "environment.json"))
    status, reason = _status(path, outcome)
    metrics, evals = read_rows(path / "metrics.jsonl"), read_rows(path / "eval.jsonl")
    if max_steps is None:
        max_steps = int(config["training"]["max_steps"]) if metrics else 0
    if read_json(path / "status.json").get("stopped"):  # [training] stop_when
        max_steps = len(metrics)
    if status == "done" and (why := _no_result(metrics, evals, max_steps)):
        status, reason = "failed", why
    spent = [accumulate([float(row.get(key, 0.0)) for row in metrics], initial=0.0) for key in _SPENT_KEYS]
    return replace(
        cell,
        status=status,
        reason=reason,
        curve=tuple((row["step"], float(row["accuracy"])) for row in evals if row.get("accuracy") is not None),
        avg_tokens=evals[-1].get("avg_tokens") if evals else None,
        spent=tuple(zip(*spent, strict=True)),
        host=str(outcome.get("host") or ""),
        attempts=outcome.get("attempts"),
    )


def _no_result(metrics: Sequence[Mapping[str, Any]], evals: Sequence[Mapping[str, Any]], max_steps: int) -> str:
    """Why a finished run has no result, or "": its end was not measured, or a number of it is not finite."""
    if not evals:
        return "it was never evaluated"
    if evals[-1]["step"] < max_steps:
        return f"no result: last evaluation after {evals[-1]['step']} of {max_steps} steps"
    if not metrics or metrics[-1]["step"] + 1 < max_steps:
        return f"no result: metrics.jsonl holds {len(metrics)} of {max_steps} steps"
    for file, rows, keys in (("eval.jsonl", evals, _EVALUATED), ("metrics.jsonl", metrics, _SPENT_KEYS)):
        for at, key in product(rows, keys):
            if key in at and (at[key] is None or not isfinite(at[key])):
                return f"{file}: {key} of step {at.get('step')} is {at[key]}"
    return ""


def _status(path: Path, outcome: Mapping[str, Any]) -> tuple[str, str]:
    """(status, reason) of a run directory."""
    stored = read_json(path / "status.json")
    state = outcome.get("status") or stored.get("outcome")
    if state in ("done", "finished"):
        return "done", ""
    if state is None:
        return "missing", "it was never started"
    if state in ("running", "preempted", "interrupted") and not outcome.get("status"):
        return "unfinished", "it has not finished"
    code = outcome.get("exit_code") or stored.get("exit_code")
    reason = str(outcome.get("reason") or stored.get("error") or f"its status is {state}")
    return "failed", reason if code is None else f"{reason} (exit {code})"


def row(cell: Cell, threshold: float | None) -> dict[str, Any]:
    """The cell as a row of results.csv and results.parquet; None for what a cell without a result lacks."""
    step = cell.reached(threshold) if cell.done and threshold is not None else None
    needed = (None,) * len(SPENT) if step is None else cell.spent_after(step)
    return {
        **{name: getattr(cell, name) for name in ("condition", "seed", "status", "reason", "accuracy", "area")},
        "avg_tokens": cell.avg_tokens if cell.done else None,
        "steps": len(cell.spent) - 1,
        **dict(zip(SPENT, cell.total, strict=True)),
        "reached": step is not None if cell.done and threshold is not None else None,
        "steps_to_threshold": step,
        **{f"{what}_to_threshold": value for what, value in zip(SPENT, needed, strict=True)},
        "host": cell.host,
        "attempts": cell.attempts,
        "path": str(cell.path),
    }


def write_tables(results: Results, directory: Path) -> list[Path]:
    """Write results.csv, and results.parquet if pyarrow is installed; one row per cell, failed ones included."""
    rows = [row(cell, results.threshold) for cell in results.runs]
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


def configuration(results: Results) -> dict[str, Any]:
    """The resolved configuration of the first run of the baseline that was started; empty without one."""
    started = results.started(results.baseline)
    return read_json(started[0].path / "config.resolved.json") if started else {}


def settings(run: Path) -> dict[str, Any]:
    """What determines a run apart from its seed: dotted key -> value; secrets are masked."""
    leaves = flatten(masked(read_json(run / "config.resolved.json")))
    return {key: value for key, value in leaves if not any(f"{key}.".startswith(f"{free}.") for free in _FREE)}


def differences(results: Results) -> dict[str, dict[str, str]]:
    """Keys that differ between conditions: key -> label -> value as JSON; `-` where it is not set.

    Conditions without a started run are left out.
    """
    found = {one: settings(cell.path) for one in results.conditions for cell in results.started(one)[:1]}
    keys = dict.fromkeys(key for values in found.values() for key in values)
    shown = {
        key: {label: json.dumps(values[key]) if key in values else "-" for label, values in found.items()}
        for key in keys
    }
    return {key: values for key, values in shown.items() if len(set(values.values())) > 1}


def environments(results: Results) -> dict[str, dict[str, int]]:
    """Of every fact about the machines and packages: value -> runs; most frequent first."""
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for cell in results.cells.values():
        facts = dict(flatten(read_json(cell.path / "environment.json"))) if cell.status != "unreadable" else {}
        if cell.host:
            facts["host"] = cell.host
        for key, value in facts.items():
            counts[key][value if isinstance(value, str) else json.dumps(value)] += 1
    return {key: dict(values.most_common()) for key, values in counts.items()}


def campaign_commands(directory: Path, results: Results) -> list[str]:
    """Commands that run the campaign again, and each of its cells alone."""
    plan = read_plan(directory)
    changed = [part for text in plan.overrides for part in ("--set", text)]
    again = shlex.join(["retrain", "campaign", plan.file or str(directory / "campaign.toml"), *changed])
    lines = ["# everything", again, f"retrain report {shlex.quote(str(directory))}"]
    lines += ["", "# one run; its name keeps it apart from the campaign's"]
    for cell in results.runs:
        config, name = str(cell.path / "config.toml"), f"again-{cell.path.parent.name}-{cell.path.name}"
        options = f"--set logging.name={_NAME.sub('-', name)} --set logging.dir=runs"
        lines.append(f"retrain train {shlex.quote(config)} {options}")
    return lines
