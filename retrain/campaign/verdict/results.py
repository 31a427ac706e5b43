"""The results of a campaign's runs: one `Cell` per condition and seed, read from files.

A failed, missing or unfinished cell stays in the table with its reason; it has no result.
"""

from __future__ import annotations

import csv
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import isfinite
from pathlib import Path
from typing import Any

from retrain.errors import ConfigError, ConfigProblem, StorageError
from retrain.storage.run_files import read_rows, understood
from retrain.system.files import staged
from retrain.system.records import read_json

SPENT = ("rollouts", "tokens", "seconds")
_SPENT_KEYS = ("rollout/completions", "tokens/sampled", "time/step_s")
_EVALUATED = ("accuracy", "avg_tokens")

COLUMNS = (
    *("condition", "seed", "status", "reason", "accuracy", "area", "avg_tokens", "steps", *SPENT, "reached"),
    *(f"{what}_to_threshold" for what in ("steps", *SPENT)),
    *("host", "attempts", "path"),
)
"""Of results.csv and results.parquet."""


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
        overrides: `key=value`, as the campaign set them.
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
    overrides: tuple[str, ...] = ()
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
        commands: what reproduces the table.
    """

    name: str
    conditions: tuple[str, ...]
    baseline: str
    seeds: tuple[int, ...]
    cells: Mapping[tuple[str, int], Cell]
    threshold: float | None = None
    alpha: float = 0.05
    ladder: tuple[tuple[str, str], ...] = ()
    commands: tuple[str, ...] = ()

    def of(self, condition: str) -> list[Cell]:
        """The condition's cells, by seed."""
        return [cell for seed in self.seeds if (cell := self.cells.get((condition, seed)))]

    def done(self, condition: str) -> dict[int, Cell]:
        """The condition's finished cells, by seed."""
        return {cell.seed: cell for cell in self.of(condition) if cell.done}

    def without_result(self) -> list[Cell]:
        """Cells that failed, are missing or unfinished, in the table's order."""
        return [cell for condition in self.conditions for cell in self.of(condition) if not cell.done]


def read_campaign(directory: Path) -> Results:
    """The table of a campaign directory.

    Raises:
        ConfigError: there is no campaign at this path.
    """
    plan = read_json(directory / "plan.json")
    if not plan:
        problem = ConfigProblem(str(directory), 0, 0, "campaign", "holds no plan.json", "give runs/NAME of a campaign")
        raise ConfigError([problem])
    with understood(directory / "plan.json"):
        cells = [_planned(directory, entry) for entry in plan["cells"]]
        found = tuple(dict.fromkeys(cell.condition for cell in cells))
        ladder = tuple((str(condition), str(against)) for condition, against in plan["ladder"])
        name, threshold, alpha = directory.resolve().name, plan["threshold"], float(plan["alpha"])
    return table(name, cells, found, plan["baseline"], threshold=threshold, alpha=alpha, ladder=ladder)


def table(
    name: str, cells: Sequence[Cell], conditions: Sequence[str], baseline: str, *, threshold: float | None, **more: Any
) -> Results:
    """Results from cells; the threshold falls back to `default_threshold`."""
    results = Results(
        name=name,
        conditions=tuple(conditions),
        baseline=baseline,
        seeds=tuple(sorted({cell.seed for cell in cells})),
        cells={(cell.condition, cell.seed): cell for cell in cells},
        threshold=threshold,
        **more,
    )
    return results if threshold is not None else replace(results, threshold=default_threshold(results))


def default_threshold(results: Results) -> float | None:
    """Nine tenths of the way that the baseline came: a + 0.9 (b - a), a and b its mean first and last accuracy.

    None if the baseline has no finished run or did not improve.
    """
    curves = [cell.curve for cell in results.done(results.baseline).values()]
    if not curves:
        return None
    first, last = (sum(curve[end][1] for curve in curves) / len(curves) for end in (0, -1))
    return first + 0.9 * (last - first) if last > first else None


def _planned(directory: Path, entry: Mapping[str, Any]) -> Cell:
    condition, seed = str(entry["condition"]), int(entry["seed"])
    path = directory / entry["path"]
    overrides = tuple(f"{key}={value}" for key, value in entry["overrides"].items())
    return read_cell(path, condition, seed, int(entry["max_steps"]), overrides)


def read_cell(
    path: Path, condition: str, seed: int, max_steps: int | None = None, overrides: tuple[str, ...] = ()
) -> Cell:
    """The cell of a run directory. A run whose files are damaged has the status "unreadable".

    How the campaign says that it ended counts; without an outcome.json, its own status.json.

    Args:
        max_steps: how many steps the run was to make; None: as its own configuration says.
    """
    cell = Cell(condition, seed, path, "unreadable", overrides=overrides)
    try:
        with understood(path):
            return _read(cell, max_steps)
    except StorageError as error:
        return replace(cell, reason=str(error))


def _read(cell: Cell, max_steps: int | None) -> Cell:
    path, outcome = cell.path, read_json(cell.path / "outcome.json")
    status, reason = _status(path, outcome)
    metrics, evals = read_rows(path / "metrics.jsonl"), read_rows(path / "eval.jsonl")
    if max_steps is None:
        max_steps = int(read_json(path / "config.resolved.json")["training"]["max_steps"]) if metrics else 0
    if status == "done" and (why := _no_result(metrics, evals, max_steps)):
        status, reason = "failed", why
    spent = [tuple(float(row.get(key, 0.0)) for key in _SPENT_KEYS) for row in metrics]
    return replace(
        cell,
        status=status,
        reason=reason,
        curve=tuple((row["step"], float(row["accuracy"])) for row in evals if row.get("accuracy") is not None),
        avg_tokens=evals[-1].get("avg_tokens") if evals else None,
        spent=tuple(zip(*(accumulate(column, initial=0.0) for column in _columns(spent)), strict=True)),
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


def _columns(rows: Sequence[tuple[float, ...]]) -> list[list[float]]:
    return [[row[index] for row in rows] for index in range(len(SPENT))]


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
    """The cell as a row of results.csv; what a cell without result does not have is None."""
    step = cell.reached(threshold) if cell.done and threshold is not None else None
    to = dict.fromkeys(SPENT) if step is None else dict(zip(SPENT, cell.spent_after(step), strict=True))
    values = {
        "condition": cell.condition,
        "seed": cell.seed,
        "status": cell.status,
        "reason": cell.reason,
        "accuracy": cell.accuracy,
        "area": cell.area,
        "avg_tokens": cell.avg_tokens if cell.done else None,
        "steps": len(cell.spent) - 1,
        **dict(zip(SPENT, cell.total, strict=True)),
        "reached": None if not cell.done or threshold is None else step is not None,
        "steps_to_threshold": step,
        **{f"{what}_to_threshold": value for what, value in to.items()},
        "host": cell.host,
        "attempts": cell.attempts,
        "path": str(cell.path),
    }
    return {name: values[name] for name in COLUMNS}


def write_tables(results: Results, directory: Path) -> list[Path]:
    """Write results.csv, and results.parquet if pyarrow is installed; one row per cell, failed ones included."""
    rows = [row(cell, results.threshold) for condition in results.conditions for cell in results.of(condition)]
    path = directory / "results.csv"
    with staged(path) as stage, stage.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if importlib.util.find_spec("pyarrow") is None:
        return [path]
    arrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), directory / "results.parquet")
    return [path, directory / "results.parquet"]
