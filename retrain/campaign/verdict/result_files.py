"""Results of runs of other programs: the last value of each run, at a step that all runs reach.

The planned length of these runs is unknown. A run that crashed looks like a run that was planned to be short, and the
last values of runs of different lengths cannot be compared. Therefore all runs are compared at one step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict.result_rows import ResultRow, measured, metrics
from retrain.campaign.verdict.results import Cell, Results, table
from retrain.errors import DataError

RunKey = tuple[str, str, int]
"""Task, method and seed of a run."""
_NOT_SPENT = ((math.nan, math.nan, math.nan),)
"""`Cell.spent` of a run whose costs are unknown."""
_NAMED = 3
"""Largest number of reasons that an error lists."""


def tables_of_rows(rows: Sequence[ResultRow], outcome: Outcome) -> list[Results]:
    """Return the table of every task in the rows of other programs' files. The first method is the baseline.

    The result of a run is its last value at or before the step of the comparison, or its mean until then. Every table
    has all methods and seeds; runs that are in no file have the status "missing".

    Args:
        rows: from `rows_of_files`.
        outcome: column or key to compare, its direction and its summary.
    Raises:
        DataError: a file measures a run that another one has, or a value is not a number; fewer than two of several
            methods have a result; or the runs have no steps in common. The message names file and line.
    """
    _check_origins(rows)
    every: dict[RunKey, list[ResultRow]] = {}
    for row in rows:
        every.setdefault((row.task, row.method, row.seed), []).append(row)
    tasks = list(dict.fromkeys(row.task for row in rows if outcome.metric in row.figures))
    cells = {run: _cell(run, own, outcome) for run, own in every.items() if run[0] in tasks}
    _check_results(cells, rows, outcome)
    methods = list(dict.fromkeys(method for _, method, _ in cells))
    runs = sorted(dict.fromkeys(run[1:] for run in cells), key=lambda run: methods.index(run[0]))
    found: list[Results] = []
    for task in tasks:
        own = [cells.get((task, *run)) or Cell(*run, Path(), "missing", "it is in no file") for run in runs]
        unknown = {run for run in runs if (task, *run) in every and every[task, *run][0].step is None}
        compared, note = at_common_step(own, unknown)
        name = f"comparison: {task}" if task else "comparison"
        words = {"task": task, "with_result": "have a result", "steps_note": note}
        found.append(table(name, compared, outcome=outcome, **words))
    return found


def _check_origins(rows: Sequence[ResultRow]) -> None:
    """Raise DataError if two files, or two runs of a chart, have the same run, or a table shares a method."""
    runs: dict[RunKey, ResultRow] = {}
    tables: dict[str, ResultRow] = {}
    for row in rows:
        first = runs.setdefault((row.task, row.method, row.seed), row)
        other = tables.setdefault(row.method, row)
        fix = "give one of them (of checkpoints, the newest), or rename one"
        if first.origin != row.origin:
            name = f"{row.method}, seed {row.seed}"
            raise DataError(f"{first.origin} and {row.origin} both have the results of {name}; {fix}")
        if other.file != row.file and (other.table or row.table):
            raise DataError(
                f"{other.file} and {row.file} both have results of {row.method!r}; merge the files, or {fix}"
            )


def _check_results(cells: Mapping[RunKey, Cell], rows: Sequence[ResultRow], outcome: Outcome) -> None:
    """Raise DataError if no run has a result, or only one of several methods."""
    if not cells:
        available = ", ".join(metrics(rows)) or "none"
        raise DataError(f"{rows[0].file}: no row has {outcome.metric!r}; metrics that rows have: {available}")
    methods = dict.fromkeys(row.method for row in rows)
    known = dict.fromkeys(cell.condition for cell in cells.values() if cell.done)
    if len(known) >= min(2, len(methods)):
        return
    without = [cell for cell in cells.values() if not cell.done]
    reasons = "; ".join(f"{cell.condition} seed {cell.seed}: {cell.reason}" for cell in without[:_NAMED])
    found = f"only {next(iter(known))} has a result" if known else "no run has a result"
    fix = "fix the last value of each run, or choose another metric with --metric"
    raise DataError(f"{without[0].path}: {found}: {reasons}; {fix}")


def _cell(run: RunKey, rows: Sequence[ResultRow], outcome: Outcome) -> Cell:
    """Return the cell of a run.

    Rows with a blank cell, NaN or infinity are skipped. The run has no result if its last value is NaN or infinite,
    if it has no value, or if only its last cell is blank: then each row is an evaluation, and the last one is missing.
    The value of rows for single problems is their mean.
    """
    metric, name = outcome.metric, f"{run[1]}, seed {run[2]}"
    cell = Cell(*run[1:], rows[0].file, "failed", mean=outcome.summary == "mean", spent=_NOT_SPENT)
    steps = _by_step(rows, metric, name)
    if not steps:
        available = ", ".join(metrics(rows)[:10]) or "no metric"
        return replace(cell, reason=f"no row of {rows[0].file} has {metric!r}; it has {available}")
    values = [(own[-1], _value(own, metric)) for own in steps]
    known = [(row, value) for row, value in values if value is not None]
    reason = ""
    if known and not math.isfinite(known[-1][1]):
        reason = f"{metric} is {known[-1][1]} in {known[-1][0].place}"
    elif not known or (values[-1][1] is None and len(known) == len(values) - 1):
        reason = f"{metric} is blank in {values[-1][0].place}"
    curve = tuple((row.step or 0, value) for row, value in known if math.isfinite(value))
    answers = {row.problem: value for row in steps[-1] if row.problem and (value := measured(row, metric)) is not None}
    problems = len(answers) if set(answers.values()) <= {0.0, 1.0} else 0
    done = {"status": "failed" if reason else "done", "reason": reason, "answers": answers, "problems": problems}
    return replace(cell, path=rows[-1].file, curve=curve, **done)


def _value(rows: Sequence[ResultRow], metric: str) -> float | None:
    values = [value for row in rows if (value := measured(row, metric)) is not None]
    return fmean(values) if values else None


def _by_step(rows: Sequence[ResultRow], metric: str, name: str) -> list[list[ResultRow]]:
    """Group the rows that have a cell of the metric by step, in ascending order: one row, or one for each problem."""
    found: dict[tuple[int | None, str], ResultRow] = {}
    for row in (row for row in rows if metric in row.figures):
        if (row.step is None) != (next(iter(found), (row.step, ""))[0] is None):
            raise DataError(f"{row.place}: only some rows of {name} have a step; add it to every row")
        before = found.get((row.step, row.problem))
        if before and None not in (measured(before, metric), measured(row, metric)):
            when = "" if row.step is None else f" at step {row.step}"
            raise DataError(
                f"{row.place}: {name}, was measured{when} before, in {before.place}: a run has one value per step; "
                "give runs different seeds, or add a column step, or problem for rows of single problems"
            )
        if before is None or measured(before, metric) is None:
            found[row.step, row.problem] = row
    steps = sorted({step for step, _ in found}, key=lambda at: at or 0)
    return [[row for (at, _), row in found.items() if at == step] for step in steps]


def at_common_step(cells: Sequence[Cell], unknown: Collection[tuple[str, int]] = ()) -> tuple[list[Cell], str]:
    """Cut the curves of all runs with a result at one step, so that their last values can be compared.

    It is the last step at which every run was measured. If that is in the first half of the shortest run, the step is
    the end of the shortest run, and the value of every other run is its last one in the last tenth before it: values of
    steps further apart would make equal curves look different.

    Args:
        cells: the runs of a task.
        unknown: (method, seed) of the runs without steps, whose only value is used.
    Returns:
        The cells, and sentences that name the step and the longer runs; "" if all runs have the same last step.
    Raises:
        DataError: a run has no value in the last tenth of the shortest run.
    """
    stepped = [cell for cell in cells if cell.done and (cell.condition, cell.seed) not in unknown]
    lone = [cell for cell in cells if cell.done and (cell.condition, cell.seed) in unknown]
    note = f"The steps of {_listed(lone, cells)} are unknown." if lone and stepped else ""
    if len(set(map(_end, stepped))) < 2:
        return [*cells], note
    end = _common_step(stepped)
    cut = {id(cell): replace(cell, curve=tuple(at for at in cell.curve if at[0] <= end)) for cell in stepped}
    near = end - abs(end) / 10
    for cell in stepped:
        if not any(near <= step <= end for step, _ in cell.curve):
            where = f"not between {near:g} and {end}, the last step of {_run(min(stepped, key=_end))}"
            fix = "compare runs that were measured at the same steps, or remove the column step to compare last values"
            steps = ", ".join(str(step) for step, _ in cell.curve[:_NAMED]) + ", ..." * (len(cell.curve) > _NAMED)
            raise DataError(f"{cell.path}: {_run(cell)} was measured at steps {steps}, but {where}; {fix}")
    lines = [*_steps_note(stepped, [cut[id(cell)] for cell in stepped], end), note]
    return [cut.get(id(cell), cell) for cell in cells], " ".join(filter(None, lines))


def _common_step(cells: Sequence[Cell]) -> int:
    shortest = min(map(_end, cells))
    shared = set.intersection(*({step for step, _ in cell.curve} for cell in cells))
    last = max(shared, default=shortest)
    return last if last >= min(shortest, shortest / 2) else shortest  # some trainers evaluate first at step -1


def _end(cell: Cell) -> int:
    return cell.curve[-1][0]


def _steps_note(cells: Sequence[Cell], cut: Sequence[Cell], end: int) -> list[str]:
    """Return sentences about the step of the comparison, the shortest runs, unused values, and earlier values."""
    shortest = min(map(_end, cells))
    short, others = ([cell for cell in cells if (_end(cell) == shortest) is side] for side in (True, False))
    methods = list(dict.fromkeys(cell.condition for cell in others))
    longer = [[cell for cell in others if cell.condition == method] for method in methods]
    unused = ", ".join(f"{_listed(own, cells)} to {_steps(own)}" for own in longer)
    lines = [
        f"Runs differ in length and are compared at step {end}. Shortest: {_listed(short, cells)} to step {shortest}. "
        f"Longer, with later values that are not used: {unused}."
    ]
    further = _common_step(others)
    if further > end and len(short) < len(others) and {cell.condition for cell in short} <= set(methods):
        lines.append(f"Without {_listed(short, cells)} it would be step {further}.")
    if early := [cell for cell in cut if _end(cell) < end]:
        lines.append(f"The values of {_listed(early, cells)} are of {_steps(early)}.")
    return lines


def _listed(some: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """Name runs by method: `grpo` for all runs of a method, else `dapo seed 3` or `5 runs of dapo`."""
    names: list[str] = []
    for method in dict.fromkeys(cell.condition for cell in some):
        own, every = ([cell for cell in group if cell.condition == method] for group in (some, cells))
        whole = method if len(own) == len(every) > 1 else ""
        names += [whole or f"{len(own)} runs of {method}"] if whole or len(own) > _NAMED else map(_run, own)
    return ", ".join(names)


def _run(cell: Cell) -> str:
    return f"{cell.condition} seed {cell.seed}"


def _steps(cells: Sequence[Cell]) -> str:
    """Return `step 100`, or `steps 60 to 100`: the last steps of these runs."""
    low, high = min(map(_end, cells)), max(map(_end, cells))
    return f"step {low}" if low == high else f"steps {low} to {high}"
