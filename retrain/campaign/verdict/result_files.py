"""Results of runs of other programs: the last value of each run, at a step that all runs reach.

The planned length of these runs is unknown. A run that crashed looks like a run that was planned to be short, and the
last values of runs of different lengths cannot be compared. Therefore all runs are compared at one step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from retrain.campaign.verdict.result_rows import ResultRow, measured, metrics, only_metric, read_result_rows
from retrain.campaign.verdict.results import Cell
from retrain.errors import DataError
from retrain.report.page import plural

RunKey = tuple[str, str, int]
"""Task, method and seed of a run."""
_NOT_SPENT = ((math.nan, math.nan, math.nan),)
"""`Cell.spent` of a run whose costs are unknown."""
_NAMED = 3
"""Largest number of reasons that an error lists."""


@dataclass(frozen=True)
class FileResults:
    """Results in the files of other programs.

    Attributes:
        metric: name of the metric.
        tasks: names of the tasks; [""] if no file has a task column.
        cells: runs by task, in the order of the files.
        notes: task -> sentences about the step at which its runs are compared; "" for runs of equal lengths.
    """

    metric: str
    tasks: Sequence[str]
    cells: Mapping[str, Sequence[Cell]]
    notes: Mapping[str, str]


def read_result_files(files: Sequence[Path], metric: str | None = None) -> FileResults:
    """Read the runs in these files. The result of a run is its last value at or before the step of the comparison.

    Args:
        files: the files.
        metric: a column or key; None: the only one there is, or `accuracy`.
    Raises:
        DataError: a file cannot be read, has no such metric, or measures one run twice; no run has a result; or the
            runs have no steps in common. The message names file and line.
        ConfigError: there are several metrics, and none was chosen.
    """
    rows = [row for file in dict.fromkeys(files) for row in read_result_rows(file)]
    name = metric or only_metric(rows)
    runs = _runs(rows, name)
    if not runs:
        available = ", ".join(metrics(rows)) or "none"
        raise DataError(f"{files[0]}: no row has {name!r}; metrics that rows have: {available}")
    tasks = list(dict.fromkeys(task for task, _, _ in runs))
    every = {(row.task, row.method, row.seed): row.file for row in rows if row.task in tasks}
    found = {
        run: _cell(run, runs[run], name) if run in runs else _without(run, file, name) for run, file in every.items()
    }
    if not any(cell.done for cell in found.values()):
        reasons = "; ".join(f"{cell.condition} seed {cell.seed}: {cell.reason}" for cell in [*found.values()][:_NAMED])
        fix = "fix the last value of each run, or choose another metric with --metric"
        raise DataError(f"{files[0]}: no run has a result: {reasons}; {fix}")
    cells, notes = dict[str, list[Cell]](), dict[str, str]()
    for task in tasks:
        own = [cell for run, cell in found.items() if run[0] == task]
        unknown = {run[1:] for run, of_run in runs.items() if run[0] == task and of_run[0].step is None}
        cells[task], notes[task] = at_common_step(own, unknown)
    return FileResults(name, tasks, cells, notes)


def _runs(rows: Sequence[ResultRow], metric: str) -> dict[RunKey, list[ResultRow]]:
    """Return the rows of each run that have a cell of the metric, by step, blank ones included."""
    found: dict[RunKey, dict[int | None, ResultRow]] = {}
    for row in rows:
        if metric not in row.figures:
            continue
        run = found.setdefault((row.task, row.method, row.seed), {})
        first = next(iter(run.values()), row)
        name = f"{row.method}, seed {row.seed}"
        if first.origin != row.origin:
            fix = "give one of them (of checkpoints, the newest), or rename one"
            raise DataError(f"{first.origin} and {row.origin} both have the results of {name}; {fix}")
        if (first.step is None) != (row.step is None):
            raise DataError(f"{row.place}: only some rows of {name} have a step; add it to every row")
        before = run.get(row.step)
        if before and None not in (measured(before, metric), measured(row, metric)):
            when = "" if row.step is None else f" at step {row.step}"
            raise DataError(
                f"{row.place}: {name}, was measured{when} before, in {before.place}: "
                "a run has one value per step; give runs different seeds, or add a column step"
            )
        if before is None or measured(before, metric) is None:
            run[row.step] = row
    return {run: [of_run[step] for step in sorted(of_run, key=lambda at: at or 0)] for run, of_run in found.items()}


def _cell(run: RunKey, rows: Sequence[ResultRow], metric: str) -> Cell:
    """Return the cell of a run from its rows in the order of steps.

    Rows with a blank cell, NaN or infinity are skipped. The run has no result if its last value is NaN or infinite,
    if it has no value, or if only its last cell is blank: then each row is an evaluation, and the last one is missing.
    """
    values = [(row, measured(row, metric)) for row in rows]
    known = [(row, value) for row, value in values if value is not None]
    curve = tuple((row.step or 0, value) for row, value in known if math.isfinite(value))
    reason = ""
    if known and not math.isfinite(known[-1][1]):
        reason = f"{metric} is {known[-1][1]} in {known[-1][0].place}"
    elif not known or (values[-1][1] is None and len(known) == len(values) - 1):
        reason = f"{metric} is blank in {rows[-1].place}"
    status = "failed" if reason else "done"
    return Cell(*run[1:], rows[-1].file, status, reason, curve, spent=_NOT_SPENT)


def _without(run: RunKey, file: Path, metric: str) -> Cell:
    """Return the cell of a run that never has the metric, such as one that crashed before its first evaluation."""
    return Cell(*run[1:], file, "failed", f"{metric} is in no row of it in {file}", (), spent=_NOT_SPENT)


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
    if not stepped:
        return [*cells], ""
    lone = [cell for cell in cells if cell.done and (cell.condition, cell.seed) in unknown]
    note = f"The steps of {_listed(lone, cells)} are unknown." if lone else ""
    if len({_end(cell) for cell in stepped}) == 1:
        return [*cells], note
    end = _common_step(stepped)
    cut = {id(cell): _cut(cell, end) for cell in stepped}
    if stale := [cell for cell in stepped if not cut[id(cell)].curve or _end(cut[id(cell)]) < _near(end)]:
        short = min(stepped, key=_end)
        steps = [step for step, _ in stale[0].curve]
        where = f"{_near(end):g} and {end}, the last step of {_listed([short], stepped)}"
        fix = "compare runs that were measured at the same steps, or remove the column step to compare last values"
        problem = f"{stale[0].path}: {_run(stale[0])} was measured at {_few(steps)}, but not between {where}"
        raise DataError(f"{problem}; {fix}")
    sentences = [*_steps_note(stepped, [cut[id(cell)] for cell in stepped], end), note]
    return [cut.get(id(cell), cell) for cell in cells], " ".join(filter(None, sentences))


def _common_step(cells: Sequence[Cell]) -> int:
    shortest = min(map(_end, cells))
    shared = set.intersection(*({step for step, _ in cell.curve} for cell in cells))
    last = max(shared, default=shortest)
    return last if last >= _half(shortest) else shortest


def _half(end: int) -> float:
    """Return the start of the second half of the steps before `end`; some trainers evaluate first at step -1."""
    return min(end, end / 2)


def _near(end: int) -> float:
    """Return the start of the last tenth of the steps before `end`."""
    return end - abs(end) / 10


def _end(cell: Cell) -> int:
    return cell.curve[-1][0]


def _cut(cell: Cell, end: int) -> Cell:
    return replace(cell, curve=tuple(point for point in cell.curve if point[0] <= end))


def _steps_note(cells: Sequence[Cell], cut: Sequence[Cell], end: int) -> list[str]:
    """Return sentences about the step of the comparison, the shortest runs, unused values, and earlier values."""
    shortest = min(map(_end, cells))
    short = [cell for cell in cells if _end(cell) == shortest]
    others = [cell for cell in cells if _end(cell) > shortest]
    methods = list(dict.fromkeys(cell.condition for cell in others))
    longer = [[cell for cell in others if cell.condition == method] for method in methods]
    unused = ", ".join(f"{_listed(own, cells)} to {_range(list(map(_end, own)))}" for own in longer)
    lines = [
        f"Runs differ in length and are compared at step {end}. Shortest: {_listed(short, cells)} to step {shortest}. "
        f"Longer, with later values that are not used: {unused}."
    ]
    if len(short) < len(others) and {cell.condition for cell in short} <= set(methods):
        further = _common_step(others)
        lines += [f"Without {_listed(short, cells)} it would be step {further}."] if further > end else []
    if early := [cell for cell in cut if _end(cell) < end]:
        lines.append(f"The values of {_listed(early, cells)} are of {_range(list(map(_end, early)))}.")
    return lines


def _listed(some: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """Name runs by method: `grpo` for all runs of a method, else `dapo seed 3` or `5 runs of dapo`."""
    names: list[str] = []
    for method in dict.fromkeys(cell.condition for cell in some):
        own, every = ([cell for cell in group if cell.condition == method] for group in (some, cells))
        if len(own) > _NAMED or (len(own) == len(every) and len(own) > 1):
            names.append(method if len(own) == len(every) else f"{plural(len(own), 'run')} of {method}")
        else:
            names += [_run(cell) for cell in own]
    return ", ".join(names)


def _run(cell: Cell) -> str:
    return f"{cell.condition} seed {cell.seed}"


def _range(steps: Sequence[int]) -> str:
    """Return `step 100`, or `steps 60 to 100`."""
    low, high = min(steps), max(steps)
    return f"step {low}" if low == high else f"steps {low} to {high}"


def _few(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:_NAMED]))
    return f"step{'s' * (len(steps) > 1)} {shown}" + (f", ..., {steps[-1]}" if len(steps) > _NAMED else "")
