"""The step at which runs of different lengths are compared.

The planned length of a run in a file is unknown. A run that crashed looks like a run that was planned to be short, and
the last values of runs of different lengths cannot be compared. Therefore all runs are compared at one step:

    grpo   0 ... 50 ... 100
    dapo   0 ... 50         both have a value at step 50, which decides; that of step 100 is not used
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from retrain.campaign.verdict.results import Cell
from retrain.errors import DataError

_NAMED = 3
"""Largest number of runs of a method that a sentence names, and of steps that an error lists."""


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
        names += [whole or f"{len(own)} runs of {method}"] if whole or len(own) > _NAMED else map(run_name, own)
    return ", ".join(names)


def run_name(cell: Cell) -> str:
    return f"{cell.condition} seed {cell.seed}"


def _steps(cells: Sequence[Cell]) -> str:
    """Return `step 100`, or `steps 60 to 100`: the last steps of these runs."""
    low, high = min(map(_end, cells)), max(map(_end, cells))
    return f"step {low}" if low == high else f"steps {low} to {high}"
