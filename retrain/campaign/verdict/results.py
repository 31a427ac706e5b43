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

from retrain.campaign.plan.declaration import Declaration, declaration
from retrain.campaign.plan.plan_file import read_outcome, read_plan
from retrain.errors import StorageError
from retrain.storage.run_files import flatten, read_rows, understood
from retrain.system.files import staged
from retrain.system.masking import masked
from retrain.system.records import read_json

SPENT = ("rollouts", "tokens", "seconds")
"""Names of the costs of a run."""
_SPENT_KEYS = ("rollout/completions", "tokens/sampled", "time/step_s")
"""Metrics of a step that sum up to the costs, in the order of SPENT."""
_EVALUATED = ("accuracy", "avg_tokens")
"""Metrics of an evaluation that must be finite."""

_FREE = ("training.seed", "logging", "checkpoint", "components")
"""Keys that may differ between the runs of a condition, or that follow from others."""

_NAME = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Cell:
    """One run: a condition with a seed.

    Attributes:
        condition, seed, path: condition and seed of the run, and its directory.
        status: "done", "failed", "missing" (never started), "unfinished" or "unreadable" (damaged files).
        reason: explains a missing result; empty when done.
        curve: (step, held-out accuracy) of every evaluation, in order.
        avg_tokens: mean length of a held-out completion at the last evaluation.
        spent: cumulative rollouts, tokens and seconds after 0, 1, 2, ... steps.
        host, attempts: machine that ran it, and number of starts.
        start: index of its warm start.
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
    start: int = 0

    @property
    def done(self) -> bool:
        """True if the run finished and was evaluated; only such cells enter statistics."""
        return self.status == "done"

    @property
    def accuracy(self) -> float | None:
        """Held-out accuracy of the last evaluation; None unless done."""
        return self.curve[-1][1] if self.done else None

    @property
    def area(self) -> float | None:
        """Mean accuracy during training: trapezoidal area under the learning curve, divided by the steps.

        None unless done; with one evaluation it is that accuracy.
        """
        if not self.done:
            return None
        if len(self.curve) == 1:
            return self.curve[0][1]
        area = sum((b - a) * (low + high) / 2 for (a, low), (b, high) in pairwise(self.curve))
        return area / (self.curve[-1][0] - self.curve[0][0])

    @property
    def total(self) -> tuple[float, float, float]:
        """Rollouts, tokens and seconds of the whole run, without evaluations."""
        return self.spent[-1]

    def reached(self, threshold: float) -> int | None:
        """Return the steps until the first evaluation of at least `threshold`; None if never reached (censored)."""
        return next((step for step, accuracy in self.curve if accuracy >= threshold), None)

    def spent_after(self, step: int) -> tuple[float, float, float]:
        """Return the rollouts, tokens and seconds of the first `step` steps."""
        return self.spent[min(step, len(self.spent) - 1)]


@dataclass(frozen=True)
class Results:
    """The results of a campaign's runs.

    Attributes:
        name: name of the campaign.
        conditions: labels, in the order of the plan.
        baseline: the condition that all are compared with.
        seeds: in ascending order.
        cells: by (condition, seed); every planned pair is there.
        threshold: accuracy for "steps to threshold"; None if the baseline did not improve or did not finish.
        alpha: significance level of each family of comparisons.
        ladder: pairs (condition, against) in which the first extends the second.
        primary: condition whose comparison with the baseline was declared before any run had started; None without
            such a declaration.
        declared: declaration of the primary comparison, which may be late; None without one.
        one_start: True if all runs begin from one warm start.
        metric: name of the measured quantity: `accuracy` on held-out problems, or a metric of another program.
        with_result: verb for runs with a result: "finished", or "have a result" if their planned length is unknown.
        steps_note: sentences about the step at which runs of different lengths are compared; "" for equal lengths.
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
    declared: Declaration | None = None
    one_start: bool = False
    metric: str = "accuracy"
    with_result: str = "finished"
    steps_note: str = ""

    @property
    def measured(self) -> str:
        """Name of the result of a run, such as "held-out accuracy"."""
        return "held-out accuracy" if self.metric == "accuracy" else self.metric

    def of(self, condition: str) -> list[Cell]:
        """Return the condition's cells in the order of seeds."""
        return [cell for seed in self.seeds if (cell := self.cells.get((condition, seed)))]

    def done(self, condition: str) -> dict[int, Cell]:
        """Return the condition's finished cells: seed -> cell."""
        return {cell.seed: cell for cell in self.of(condition) if cell.done}

    def started(self, condition: str) -> list[Cell]:
        """Return the condition's cells whose run was started, finished ones first."""
        readable = [cell for cell in self.of(condition) if cell.status != "unreadable"]
        found = [cell for cell in readable if (cell.path / "config.resolved.json").is_file()]
        return sorted(found, key=lambda cell: not cell.done)

    def pairs(self, condition: str, against: str) -> list[tuple[Cell, Cell]]:
        """Return the pairs of cells with the same seed that finished in both conditions, by seed."""
        left, right = self.done(condition), self.done(against)
        return [(left[seed], right[seed]) for seed in left if seed in right]

    @property
    def runs(self) -> list[Cell]:
        """All cells, by condition and seed."""
        return [cell for condition in self.conditions for cell in self.of(condition)]

    @property
    def starts(self) -> int:
        """Number of warm starts of the runs."""
        return len({cell.start for cell in self.cells.values()})

    @property
    def limits(self) -> str:
        """Caveat about the scope of the findings, as a sentence after a space, or ""."""
        return " All runs use one warm start, so the findings hold for this start only." if self.one_start else ""

    @property
    def lost(self) -> list[Cell]:
        """Cells that failed, are missing or unfinished."""
        return [cell for cell in self.runs if not cell.done]


def read_campaign(directory: Path, task: str = "") -> Results:
    """Read the results of a campaign from its directory.

    Args:
        directory: directory of the campaign.
        task: task to read, in a campaign with tasks. "": each pair of condition and task counts as a condition.
    Raises:
        ConfigError: the path is not a campaign.
        StorageError: its plan cannot be read.
    """
    plan, name = read_plan(directory), directory.resolve().name
    seeds = list(dict.fromkeys(job.seed for job in plan.cells))
    cells = [
        replace(
            read_cell(directory / job.path, job.method if task else job.condition, job.seed, job.max_steps),
            start=seeds.index(job.seed) % plan.warm_starts,
        )
        for job in plan.cells
        if task in ("", job.task)
    ]
    if plan.tasks and not task:
        return table(name, cells, alpha=plan.alpha)
    facts = plan.model_dump(include={"baseline", "threshold", "alpha", "ladder"})
    declared = declaration(plan)
    facts |= {"declared": declared, "primary": plan.primary if declared and not declared.late else None}
    found = table(f"{name}: {task}" if task else name, cells, **facts)
    warmed = bool(configuration(found).get("warmup", {}).get("steps"))
    return replace(found, one_start=warmed and found.starts == 1)


def table(name: str, cells: Sequence[Cell], *, baseline: str | None = None, **more: Any) -> Results:
    """Build `Results` from cells, in their order.

    Unless `more` sets a threshold, it is the accuracy at which the baseline has made nine tenths of its improvement
    from the first to the last evaluation (means over runs). Without finished runs or improvement it is None.

    Args:
        name: name of the campaign.
        cells: one cell for each condition and seed.
        baseline: label of the baseline; None: the first condition.
        more: further attributes of `Results`.
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
    """Read the cell of a run directory; a run with damaged files has the status "unreadable".

    The status comes from the campaign's outcome.json, or without one from the run's status.json.

    Args:
        path: run directory.
        condition: label of the condition.
        seed: seed of the run.
        max_steps: planned number of steps; None: that of the run's configuration.
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
    """Return why a finished run has no result, or "".

    Either its last step was not evaluated, or one of its numbers is not finite.
    """
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
    """Return (status, reason) of a run directory."""
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
    """Return a cell as a row of results.csv and results.parquet; missing values are None."""
    step = cell.reached(threshold) if cell.done and threshold is not None else None
    needed = (None,) * len(SPENT) if step is None else cell.spent_after(step)
    return {
        **{name: getattr(cell, name) for name in ("condition", "seed", "status", "reason", "accuracy", "area")},
        "avg_tokens": cell.avg_tokens if cell.done else None,
        "steps": len(cell.spent) - 1,
        **dict(zip(SPENT, cell.total, strict=True)),
        "reached": step is not None if cell.done and threshold is not None else None,
        "steps_to_threshold": step,
        **{f"{cost}_to_threshold": value for cost, value in zip(SPENT, needed, strict=True)},
        "host": cell.host,
        "attempts": cell.attempts,
        "path": str(cell.path),
    }


def write_tables(results: Results, directory: Path) -> list[Path]:
    """Write results.csv, and results.parquet if pyarrow is installed, with one row per cell, including failed ones.

    Returns the paths of the files.
    """
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
    """Return the resolved configuration of the baseline's first run that was started; empty without one."""
    started = results.started(results.baseline)
    return read_json(started[0].path / "config.resolved.json") if started else {}


def settings(run: Path) -> dict[str, Any]:
    """Return the settings of a run apart from its seed, dotted key -> value; secrets are masked."""
    leaves = flatten(masked(read_json(run / "config.resolved.json")))
    return {key: value for key, value in leaves if not any(f"{key}.".startswith(f"{free}.") for free in _FREE)}


def differences(results: Results) -> dict[str, dict[str, str]]:
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
