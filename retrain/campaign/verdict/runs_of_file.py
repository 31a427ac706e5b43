"""Results of the runs in a file of results: the last value of each run, at a step that all runs reach.

The planned length of a run in a file is unknown. A run that crashed looks like a run that was planned to be short, and
the last values of runs of different lengths cannot be compared. Therefore all runs are compared at one step:

    grpo   0 ... 50 ... 100
    dapo   0 ... 50         both have a value at step 50, which decides; that of step 100 is not used
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict.results import Cell, Results, at_shared_steps, results_of
from retrain.campaign.verdict.results_file import ResultRow, measured, metrics
from retrain.errors import DataError
from retrain.report.page import plural

RunKey = tuple[str, str, int]
"""Task, method and seed of a run."""
_NOT_SPENT = ((math.nan, math.nan, math.nan),)
"""`Cell.spent` of a run whose costs are unknown."""
_NAMED = 3
"""Largest number of runs or problems that a message names."""


def runs_of_file(file: Path, rows: Sequence[ResultRow], outcome: Outcome) -> list[Results]:
    """Return the results of every task in a file. The first method is the baseline.

    The result of a run is its last value at or before the step of the comparison, or its mean until then. Each task has
    all methods and seeds; runs without a row have the status "missing".

    Args:
        file: the file, for messages.
        rows: its rows.
        outcome: column to compare, its direction and its summary.
    Raises:
        DataError: a run was measured twice at one step, or a value is not a number; fewer than two of several methods
            have a result; the runs have no steps in common, or answered different problems.
    """
    rows_of_run: dict[RunKey, list[ResultRow]] = {}
    for row in rows:
        rows_of_run.setdefault((row.task, row.method, row.seed), []).append(row)
    with_metric = [row for row in rows if outcome.metric in row.metrics]
    tasks = list(dict.fromkeys(row.task for row in with_metric))
    if not tasks:
        available = ", ".join(metrics(rows)) or "none"
        raise DataError(f"{file}: no row has {outcome.metric!r}; metrics that rows have: {available}")
    kept = {run: _last_attempt(run, tries, outcome.metric) for run, tries in rows_of_run.items() if run[0] in tasks}
    _check_order(file, kept, rows_of_run, outcome.metric)
    cells = {run: _cell(file, run, rows, outcome) for run, (rows, _) in kept.items()}
    _check_results(file, cells)
    methods = list(dict.fromkeys(method for _, method, _ in cells))
    # Every task has the same runs in one order, so that a seed's values can be averaged over tasks.
    runs = sorted(dict.fromkeys(run[1:] for run in cells), key=lambda run: methods.index(run[0]))
    tables: list[Results] = []
    for task in tasks:
        of_task = [cells.get((task, *run)) or Cell(*run, file, "missing", "the file has no row of it") for run in runs]
        without_steps = {run for run in runs if (task, *run) in kept and kept[task, *run][0][0].step is None}
        compared, note = at_common_step(of_task, without_steps)
        _check_problems(file, compared)
        back = [sentence for run, (_, sentence) in kept.items() if sentence and run[0] == task]
        more = [f"{plural(len(back) - _NAMED, 'more run')} go back as well."] if len(back) > _NAMED else []
        notes = [*back[:_NAMED], *more, note]
        name = f"comparison: {task}" if task else "comparison"
        words = {"task": task, "with_result": "have a result", "steps_note": " ".join(filter(None, notes))}
        tables.append(results_of(name, at_shared_steps(compared), outcome=outcome, **words))
    return tables


def _last_attempt(run: RunKey, rows: Sequence[ResultRow], metric: str) -> tuple[list[ResultRow], str]:
    """Return the rows of a run's last attempt, and a sentence about the rows that are left out.

    A log whose steps go back was continued from an earlier checkpoint, so its rows from there on were abandoned.
    """
    last: dict[str, ResultRow] = {}
    dropped: set[int] = set()
    notes: list[str] = []
    for index, row in enumerate(rows):
        # Rows of other metrics may be logged at other steps, and say nothing about the order of these.
        if row.step is None or metric not in row.metrics or measured(row, metric) is None:
            continue
        before = last.get(row.problem)
        if before and before.step is not None and row.step < before.step:
            dropped |= {
                number
                for number, earlier in enumerate(rows[:index])
                if earlier.problem == row.problem and earlier.step is not None and earlier.step >= row.step
            }
            notes.append(f"from step {before.step} ({before.line}) to step {row.step} ({row.line})")
        last[row.problem] = row
    if not dropped:
        return [*rows], ""
    name = f"{run[1]} seed {run[2]}"
    sentence = f"{name} goes back {notes[0]}: {plural(len(dropped), 'row')} of an abandoned attempt left out."
    return [row for index, row in enumerate(rows) if index not in dropped], sentence


def _check_order(
    file: Path,
    kept: Mapping[RunKey, tuple[list[ResultRow], str]],
    rows_of_run: Mapping[RunKey, Sequence[ResultRow]],
    metric: str,
) -> None:
    """Raise DataError if the steps of all runs only go down: such a file is sorted, and no run went back."""
    several = [rows for run, rows in rows_of_run.items() if run in kept and not rows[0].problem]
    steps = [[row.step or 0 for row in rows if metric in row.metrics] for rows in several]
    changes = [pair for steps_of_run in steps for pair in pairwise(steps_of_run)]
    # One change alone, from 30 to 10 say, is a run that was continued from a checkpoint.
    if len(changes) > 1 and all(later < earlier for earlier, later in changes):
        raise DataError(f"{file}: the steps of every run go down from row to row; sort the rows by step")


def _check_results(file: Path, cells: Mapping[RunKey, Cell]) -> None:
    """Raise DataError if no run has a result, or only one of several methods."""
    methods = dict.fromkeys(cell.condition for cell in cells.values())
    with_result = dict.fromkeys(cell.condition for cell in cells.values() if cell.done)
    # A single method is summarized; two methods of which one has no result would be a table without a comparison.
    if len(with_result) >= min(2, len(methods)):
        return
    without = [cell for cell in cells.values() if not cell.done]
    reasons = "; ".join(f"{run_name(cell)}: {cell.reason}" for cell in without[:_NAMED])
    problem = f"only {next(iter(with_result))} has a result" if with_result else "no run has a result"
    fix = "fix the last value of each run, or choose another metric with --metric"
    raise DataError(f"{file}: {problem}: {reasons}; {fix}")


def _check_problems(file: Path, cells: Sequence[Cell]) -> None:
    """Raise DataError if two runs were measured on different problems: their means do not compare."""
    done = [cell for cell in cells if cell.done]
    first = next((cell for cell in done if cell.answers), None)
    for cell in done:
        lacking = [*first.answers.keys() - cell.answers.keys()] if first else []
        extra = [*cell.answers.keys() - first.answers.keys()] if first else []
        if first and (lacking or extra):
            where = run_name(cell), run_name(first)
            has, lacks = where if extra else where[::-1]
            named = ", ".join(sorted(extra or lacking)[:_NAMED])
            count = plural(len(extra or lacking), "problem")
            fix = "score all runs on the same problems, or remove the rows of the others"
            raise DataError(f"{file}: {has} has a value for {count} that {lacks} lacks, such as {named}; {fix}")


def _cell(file: Path, run: RunKey, rows: Sequence[ResultRow], outcome: Outcome) -> Cell:
    """Return the cell of a run.

    Rows with a blank cell, NaN or infinity are skipped. The run has no result if its last value is NaN or infinite,
    if it has no value, or if only its last cell is blank: then each row is an evaluation, and the last one is missing.
    The value of rows for single problems is their mean.
    """
    metric = outcome.metric
    cell = Cell(*run[1:], file, "failed", mean=outcome.summary == "mean", spent=_NOT_SPENT)
    steps = _by_step(rows, metric, f"{run[1]}, seed {run[2]}")
    if not steps:
        available = ", ".join(metrics(rows)[:10]) or "no metric"
        return replace(cell, reason=f"no row of it has {metric!r}; it has {available}")
    # The last row of a step names the line in messages.
    values = [(rows[-1], _value(rows, metric)) for rows in steps]
    given = [(row, value) for row, value in values if value is not None]
    reason = ""
    if given and not math.isfinite(given[-1][1]):
        reason = f"{metric} is {given[-1][1]} in {given[-1][0].line}"
    elif not given or (values[-1][1] is None and len(given) == len(values) - 1):
        reason = f"{metric} is blank in {values[-1][0].line}"
    answers = {
        rows[0].step or 0: {row.problem: value for row in rows if (value := measured(row, metric)) is not None}
        for rows in steps
        if rows[0].problem
    }
    # Only then is the mean a share, with the resolution and the variance of a share.
    right_or_wrong = all(value in (0.0, 1.0) for answered in answers.values() for value in answered.values())
    return replace(
        cell,
        status="failed" if reason else "done",
        reason=reason,
        curve=tuple((row.step or 0, value) for row, value in given if math.isfinite(value)),
        answers_by_step=answers,
        problems=len(next(iter(answers.values()), ())) if right_or_wrong else 0,
    )


def _value(rows: Sequence[ResultRow], metric: str) -> float | None:
    values = [value for row in rows if (value := measured(row, metric)) is not None]
    return fmean(values) if values else None


def _by_step(rows: Sequence[ResultRow], metric: str, name: str) -> list[list[ResultRow]]:
    """Group the rows that have a cell of the metric by step, in ascending order: one row, or one for each problem."""
    row_of: dict[tuple[int | None, str], ResultRow] = {}
    for row in (row for row in rows if metric in row.metrics):
        first_step = next(iter(row_of), (row.step, ""))[0]
        if (row.step is None) != (first_step is None):
            raise DataError(f"{row.line}: only some rows of {name} have a step; add it to every row")
        before = row_of.get((row.step, row.problem))
        if before and None not in (measured(before, metric), measured(row, metric)):
            when = "" if row.step is None else f" at step {row.step}"
            raise DataError(
                f"{row.line}: {name}, was measured{when} before, in {before.line}: a run has one value per step; "
                "give runs different seeds, or add a column step, or problem for rows of single problems"
            )
        # Loggers that write one row per metric leave the others blank; the row with the value counts.
        if before is None or measured(before, metric) is None:
            row_of[row.step, row.problem] = row
    steps = sorted({step for step, _ in row_of}, key=lambda at: at or 0)
    return [[row for (at, _), row in row_of.items() if at == step] for step in steps]


def at_common_step(cells: Sequence[Cell], without_steps: Collection[tuple[str, int]] = ()) -> tuple[list[Cell], str]:
    """Cut the curves of all runs with a result at one step, so that their last values can be compared.

    It is the last step at which every run was measured. If that is in the first half of the shortest run, the step is
    the end of the shortest run, and the value of every other run is its last one in the last tenth before it: values of
    steps further apart would make equal curves look different.

    Args:
        cells: the runs of a task.
        without_steps: (method, seed) of the runs without steps, whose only value is used.
    Returns:
        The cells, and sentences that name the step and the longer runs; "" if all runs have the same last step.
    Raises:
        DataError: a run has no value in the last tenth of the shortest run.
    """
    stepped = [cell for cell in cells if cell.done and (cell.condition, cell.seed) not in without_steps]
    lone = [cell for cell in cells if cell.done and (cell.condition, cell.seed) in without_steps]
    note = f"The steps of {_listed(lone, cells)} are unknown." if lone and stepped else ""
    if len(set(map(_end, stepped))) < 2:
        return [*cells], note
    end = _common_step(stepped)
    cut = {id(cell): replace(cell, curve=tuple(at for at in cell.curve if at[0] <= end)) for cell in stepped}
    # abs: the last step of a run may be -1, and the range must still lie before it.
    near = end - abs(end) / 10
    for cell in stepped:
        if not any(near <= step <= end for step, _ in cell.curve):
            where = f"not between {near:g} and {end}, the last step of {run_name(min(stepped, key=_end))}"
            fix = "compare runs that were measured at the same steps, or remove the column step to compare last values"
            steps = ", ".join(str(step) for step, _ in cell.curve[:_NAMED]) + ", ..." * (len(cell.curve) > _NAMED)
            raise DataError(f"{cell.path}: {run_name(cell)} was measured at steps {steps}, but {where}; {fix}")
    lines = [*_steps_note(stepped, [cut[id(cell)] for cell in stepped], end), note]
    return [cut.get(id(cell), cell) for cell in cells], " ".join(filter(None, lines))


def _common_step(cells: Sequence[Cell]) -> int:
    shortest = min(map(_end, cells))
    shared = set.intersection(*({step for step, _ in cell.curve} for cell in cells))
    # Without a shared step the values just before the shortest end are the closest in training.
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
    unused = ", ".join(f"{_listed(group, cells)} to {_steps(group)}" for group in longer)
    lines = [
        f"Runs differ in length and are compared at step {end}. Shortest: {_listed(short, cells)} to step {shortest}. "
        f"Longer, with later values that are not used: {unused}."
    ]
    further = _common_step(others)
    # The advice is given only if fewer runs would be lost than kept, and no method as a whole.
    if further > end and len(short) < len(others) and {cell.condition for cell in short} <= set(methods):
        lines.append(f"Without {_listed(short, cells)} it would be step {further}.")
    if early := [cell for cell in cut if _end(cell) < end]:
        lines.append(f"The values of {_listed(early, cells)} are of {_steps(early)}.")
    return lines


def _listed(some: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """Name runs by method: `grpo` for all runs of a method, else `dapo seed 3` or `5 runs of dapo`."""
    names: list[str] = []
    for method in dict.fromkeys(cell.condition for cell in some):
        chosen, every = ([cell for cell in group if cell.condition == method] for group in (some, cells))
        whole = method if len(chosen) == len(every) > 1 else ""
        if whole or len(chosen) > _NAMED:
            names.append(whole or f"{len(chosen)} runs of {method}")
        else:
            names += map(run_name, chosen)
    return ", ".join(names)


def run_name(cell: Cell) -> str:
    return f"{cell.condition} seed {cell.seed}"


def _steps(cells: Sequence[Cell]) -> str:
    """Return `step 100`, or `steps 60 to 100`: the last steps of these runs."""
    low, high = min(map(_end, cells)), max(map(_end, cells))
    return f"step {low}" if low == high else f"steps {low} to {high}"
