"""Reasons to withhold a verdict: runs that trained nothing, values of another unit, and impossible margins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from retrain.campaign.plan.outcome import gain_word
from retrain.campaign.verdict.results import Cell, Results
from retrain.report.page import plural

_FACTOR = 30.0
"""Ratio of two values, one of them at most 1, from which they are taken for different units.

Percent is a hundred times a share, and methods may differ by three in either direction.
"""
_EVALUATIONS = 3
"""Evaluations that must have one value before it says that nothing was trained.

The share of right answers of two models is the same number by chance in 3 to 5 % of the runs (256 to 512 problems).
"""
_NAMED = 3
"""Largest number of runs of a condition that a sentence names."""


def health(results: Results, conditions: Sequence[str], warning: str) -> dict[str, str]:
    """Return why a verdict is withheld, or a warning about some of its runs."""
    if reason := results.units or other_units(results, conditions):
        return {"withheld": reason}
    some = [warning] if warning else []
    for label in conditions:
        count, reason = trained_nothing(results, label)
        runs = len(results.done(label))
        # Where only some of its runs trained nothing, that is a result of the method.
        if count and count == runs:
            return {"withheld": f"{'all ' * (runs > 1)}{plural(runs, 'run')} of {label} trained nothing: {reason}"}
        some += [f"{count} of {runs} runs of {label} trained nothing: {reason}"] if count else []
    return {"warning": "; ".join(some)}


def trained_nothing(results: Results, condition: str) -> tuple[int, str]:
    """Return the number of a condition's runs that trained nothing, and the reason of the first."""
    reasons = [reason for cell in results.done(condition).values() if (reason := _no_training(results, cell))]
    return len(reasons), next(iter(reasons), "")


def _no_training(results: Results, cell: Cell) -> str:
    """Return why a run shows no training, or ""."""
    if cell.no_update:
        return cell.no_update
    values = {value for _, value in cell.curve}
    metric = results.outcome.metric
    if len(values) > 1 or not gain_word(metric):
        return ""  # a share of truncated answers, for instance, may well stay at 0
    (value,) = values
    # A share cannot leave its range, so that no condition can be better than one at its limit.
    if results.outcome.share and value in (0.0, 1.0):
        return f"{metric} is {value:g} in every evaluation, its {'ceiling' if value else 'floor'}"
    is_told = len(cell.curve) >= _EVALUATIONS
    return f"{metric} is that of the start, {value:.3f}, in every evaluation" if is_told else ""


def other_units(results: Results, conditions: Sequence[str]) -> str:
    """Describe the runs of two conditions whose results look like another unit than the rest; "" if none does."""
    cells = [cell for label in conditions for cell in results.done(label).values()]
    values = {(cell.condition, cell.seed): cell.result or 0.0 for cell in cells}
    groups = _units([*values.values()], results.outcome.share)
    if not groups:
        return ""
    # The smaller group is named: most often one file or one run was written in another unit.
    few, many = sorted(groups, key=len)
    foreign = {run: value for run, value in values.items() if value in few}
    return f"{_described(results, foreign)} beside {_span(many)}: different units?"


def task_units(tables: Sequence[Results]) -> str:
    """Describe tasks of different units, whose values have no mean; "" if all have one."""
    values = {table.task: [value for label in table.conditions for value in table.values(label)] for table in tables}
    every = [value for of_task in values.values() for value in of_task]
    if not _units(every, tables[0].outcome.share):
        return ""
    return "tasks of different units have no mean: " + ", ".join(
        f"{task} {_span(of_task)}" for task, of_task in values.items()
    )


def margin_problem(results: Results) -> str:
    """Describe a margin that no difference could exceed; "" if it is possible."""
    margin = results.outcome.margin
    values = [value for label in results.conditions for value in results.values(label)]
    if margin is None or not values:
        return ""
    largest = max(map(abs, values))
    # Below 1 a margin is possible in any unit; a larger one must not exceed the largest value.
    if margin < 1 or margin <= largest > 1:
        return ""
    return f"a margin of {margin:g} is beyond the range of the values, {_span(values)}"


def _units(values: Sequence[float], share: bool) -> list[list[float]]:
    """Split values into those of a share and the others; [] if they look like one unit. 0 is 0 in any unit."""
    # 0 and negative values fit both units; only of a share is a negative value impossible.
    shares = [value for value in values if 0 < value <= 1]
    others = [value for value in values if value > 1 or (share and value < 0)]
    if not shares or not others:
        return []
    return [others, shares] if share or min(map(abs, others)) >= _FACTOR * max(shares) else []


def _described(results: Results, foreign: Mapping[tuple[str, int], float]) -> str:
    """Name runs with their values: `maxrl seed 3 is 47`, or `maxrl is 40.1 to 44` for all runs of a condition."""
    parts: list[str] = []
    for label in dict.fromkeys(label for label, _ in foreign):
        values = {seed: value for (condition, seed), value in foreign.items() if condition == label}
        if len(values) == len(results.done(label)) > 1:
            parts.append(f"{label} is {_span([*values.values()])}")
        else:
            parts += [f"{label} seed {seed} is {value:.4g}" for seed, value in [*values.items()][:_NAMED]]
            parts += [f"{plural(len(values) - _NAMED, 'more run')} of {label}"] * (len(values) > _NAMED)
    return ", ".join(parts)


def _span(values: Sequence[float]) -> str:
    low, high = (f"{end:.4g}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"
