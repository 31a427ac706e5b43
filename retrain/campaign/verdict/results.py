"""The results of runs: one `Cell` per condition and seed, in the tables `Results` of one task and one outcome.

A failed, missing or unfinished cell stays in the table with its reason; it has no result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from retrain.campaign.plan.declaration import Declaration
from retrain.campaign.plan.outcome import Outcome
from retrain.errors import DataError

SPENT = ("rollouts", "tokens", "seconds")
"""Names of the costs of a run."""
ALL_TASKS = "all tasks"
"""Name of the table of means over tasks."""


@dataclass(frozen=True)
class Cell:
    """One run: a condition with a seed.

    Attributes:
        condition, seed, path: condition and seed of the run, and its directory or file.
        status: "done", "failed", "missing" (never started), "unfinished" or "unreadable" (damaged files).
        reason: explains a missing result; empty when done.
        curve: (step, value of the outcome's metric) of every evaluation or step, in order.
        mean: True if the result is the mean over the shared steps, False if it is the last value.
        shared_steps: steps at which every run of the task was measured; None: use every step of this curve.
        avg_tokens: mean length of a held-out completion at the last evaluation.
        problems: number of held-out problems behind an accuracy; 0 if the metric is not a share of problems.
        answers_by_step: step -> problem -> value; empty unless the runs were read from a file with a row per problem.
        spent: cumulative rollouts, tokens and seconds after 0, 1, 2, ... steps.
        host, attempts: machine that ran it, and number of starts.
        start: index of its warm start.
        ended: True if a campaign has recorded its end; it gets no further attempt.
        no_update: why no step of the run changed a weight; "" if one did, or if it is not known.
        findings: names of the problems that the run reported.
    """

    condition: str
    seed: int
    path: Path
    status: str
    reason: str = ""
    curve: tuple[tuple[int, float], ...] = ()
    mean: bool = False
    shared_steps: frozenset[int] | None = None
    avg_tokens: float | None = None
    problems: int = 0
    answers_by_step: Mapping[int, Mapping[str, float]] = field(default_factory=dict[int, Mapping[str, float]])
    spent: tuple[tuple[float, float, float], ...] = ((0.0, 0.0, 0.0),)
    host: str = ""
    attempts: int | None = None
    start: int = 0
    ended: bool = False
    no_update: str = ""
    findings: tuple[str, ...] = ()

    @property
    def done(self) -> bool:
        """True if the run has a result; only such cells enter statistics."""
        return self.status == "done"

    @property
    def shared_curve(self) -> list[tuple[int, float]]:
        """The curve at the shared steps."""
        return [point for point in self.curve if self.shared_steps is None or point[0] in self.shared_steps]

    @property
    def answers(self) -> Mapping[str, float]:
        """Value of each problem at the last step of the curve; empty if they are not known."""
        # The curve may be cut at a common step, and the answers must be those of that step.
        return self.answers_by_step.get(self.curve[-1][0], {}) if self.curve else {}

    @property
    def result(self) -> float | None:
        """Last value of the curve, or the mean over the shared steps; None unless done."""
        if not self.done:
            return None
        return fmean(value for _, value in self.shared_curve) if self.mean else self.curve[-1][1]

    @property
    def area(self) -> float | None:
        """Mean value during training: trapezoidal area under the curve, divided by last - first shared step.

        None unless done, or if there are fewer than two shared steps.
        """
        curve = self.shared_curve
        if not self.done or len(curve) < 2:
            return None
        # Evaluations need not be equally spaced, so a plain mean would weigh their steps unequally.
        area = sum((b - a) * (low + high) / 2 for (a, low), (b, high) in pairwise(curve))
        return area / (curve[-1][0] - curve[0][0])

    @property
    def total(self) -> tuple[float, float, float]:
        """Rollouts, tokens and seconds of the whole run, without evaluations."""
        return self.spent[-1]

    def reached(self, threshold: float | None, sign: int = 1) -> int | None:
        """Return the first step whose value is as good as `threshold` or better; None if there is none (censored)."""
        if threshold is None or not self.done:
            return None
        return next((step for step, value in self.curve if sign * value >= sign * threshold), None)

    def spent_after(self, step: int) -> tuple[float, float, float]:
        """Return the rollouts, tokens and seconds of the first `step` steps."""
        return self.spent[min(step, len(self.spent) - 1)]


@dataclass(frozen=True)
class Results:
    """The results of runs on one task, in one outcome.

    Attributes:
        name: name of the campaign, with the task if there are several.
        conditions: labels, in the order of the plan.
        baseline: the condition that all are compared with.
        seeds: in ascending order.
        cells: by (condition, seed); every planned pair is there.
        outcome: what is measured.
        task: name of the task; "" if there is one.
        threshold: value for "steps to threshold"; None if the baseline did not improve or did not finish.
        alpha: significance level of each family of comparisons.
        ladder: pairs (condition, against) in which the first extends the second.
        controls: conditions whose result is known in advance; they check the experiment.
        control_of: control -> the condition that it is compared with, if that is not the baseline.
        declared: declaration of the primary comparison, which may be late; None without one.
        one_start: True if all runs begin from one warm start.
        paired: True if runs of one seed are a pair.
        with_result: what a report says of runs that are done: "finished", or "have a result" if their planned length is
            unknown.
        looks: seeds of each declared look, in the order in which they run; empty without looks.
        late: sentences for the report if looks, seeds or conditions were changed after runs had started.
        units: why results of several tasks must not be averaged; "" if they may.
        steps_note: sentences about the step at which runs of different lengths are compared; "" for equal lengths.
    """

    name: str
    conditions: tuple[str, ...]
    baseline: str
    seeds: tuple[int, ...]
    cells: Mapping[tuple[str, int], Cell]
    outcome: Outcome = field(default_factory=Outcome)
    task: str = ""
    threshold: float | None = None
    alpha: float = 0.05
    ladder: tuple[tuple[str, str], ...] = ()
    controls: tuple[str, ...] = ()
    control_of: Mapping[str, str] = field(default_factory=dict[str, str])
    declared: Declaration | None = None
    one_start: bool = False
    paired: bool = True
    with_result: str = "finished"
    looks: tuple[tuple[int, ...], ...] = ()
    late: str = ""
    units: str = ""
    steps_note: str = ""

    @property
    def claimed(self) -> tuple[str, str, str] | None:
        """The (task, condition, against) that was declared before any run had started; None without such."""
        record = self.declared
        if not record or not record.primary or record.late:
            return None
        return record.claim or "", record.primary, record.baseline

    def of(self, condition: str) -> list[Cell]:
        """Return the condition's cells in the order of seeds."""
        return [cell for seed in self.seeds if (cell := self.cells.get((condition, seed)))]

    def done(self, condition: str) -> dict[int, Cell]:
        """Return the condition's finished cells: seed -> cell."""
        return {cell.seed: cell for cell in self.of(condition) if cell.done}

    def values(self, condition: str) -> list[float]:
        """Return the results of the condition's finished runs in the order of seeds."""
        return [cell.result for cell in self.of(condition) if cell.result is not None]

    def started(self, condition: str) -> list[Cell]:
        """Return the condition's cells whose run was started, finished ones first."""
        # Its files are read again for settings, and would raise the same error there.
        readable = [cell for cell in self.of(condition) if cell.status != "unreadable"]
        started = [cell for cell in readable if (cell.path / "config.resolved.json").is_file()]
        return sorted(started, key=lambda cell: not cell.done)

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

    def by_start(self, values: Mapping[int, float]) -> dict[int, float]:
        """Average values by seed over each warm start, as first seed of the start -> mean; with one start keep them.

        The runs of one warm start share its randomness, so that they count as one observation. The key is a seed also
        if each seed has its own start, because looks select by seed, and one number of starts for all comparisons keeps
        their columns aligned where a condition lacks the runs of a start.
        """
        if self.starts < 2:
            return dict(values)
        start = {cell.seed: cell.start for cell in self.cells.values()}
        first = {start[seed]: seed for seed in sorted(start, reverse=True)}
        grouped: dict[int, list[float]] = {}
        for seed, value in values.items():
            grouped.setdefault(first[start[seed]], []).append(value)
        return {seed: fmean(group) for seed, group in grouped.items()}

    @property
    def lost(self) -> list[Cell]:
        """Cells without a result: failed, missing, unfinished or unreadable."""
        return [cell for cell in self.runs if not cell.done]

    def without(self, dropped: Callable[[Cell], bool]) -> Results:
        """Return the results without some cells."""
        return replace(self, cells={run: cell for run, cell in self.cells.items() if not dropped(cell)})

    def with_failures(self) -> Results:
        """Return the table with every failed run counted as the worst value that any run has."""
        sign = self.outcome.sign
        # The worst of all conditions, because the failed condition may have no other run.
        worst = sign * min((sign * cell.result for cell in self.runs if cell.result is not None), default=0.0)
        counted = {
            run: replace(cell, status="done", curve=((0, worst),), mean=False) if cell.status == "failed" else cell
            for run, cell in self.cells.items()
        }
        return replace(self, cells=counted)


def results_of(name: str, cells: Sequence[Cell], *, baseline: str | None = None, **more: Any) -> Results:
    """Build `Results` from cells, in their order.

    The threshold is the value at which the baseline has made nine tenths of its improvement
    from the first to the last evaluation (means over runs). Without finished runs or improvement it is None.

    Args:
        name: name of the table.
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
    # Means over runs: the first and the last value of one run alone are noisy.
    first, last = (fmean(curve[end][1] for curve in curves) for end in (0, -1))
    better = results.outcome.sign * (last - first) > 0
    return replace(results, threshold=first + 0.9 * (last - first)) if better else results


def at_shared_steps(cells: Sequence[Cell]) -> list[Cell]:
    """Set `shared_steps` of each run to the steps at which all finished runs of the task were measured.

    Means and areas use only these steps. Otherwise they would depend on how often a run was evaluated.

    Raises:
        DataError: a mean is the result, and the runs share fewer than two steps.
    """
    done = [cell for cell in cells if cell.done]
    # Only runs with a result count: a crashed one would shorten the curves of all others.
    steps = [frozenset(step for step, _ in cell.curve) for cell in done]
    shared = frozenset[int].intersection(*steps) if steps else frozenset[int]()
    if len(shared) < 2 and any(cell.mean for cell in done):
        runs: dict[str, str] = {}
        # Of each condition the error names the run with the fewest steps, which is the last in this order.
        for cell, measured_at in sorted(zip(done, steps, strict=True), key=lambda run: -len(run[1])):
            first = ", ".join(map(str, sorted(measured_at)[:3])) + ", ..." * (len(measured_at) > 3)
            runs[cell.condition] = f"{cell.condition} seed {cell.seed} at {first}"
        problem = f"a mean over training needs two steps at which all runs were measured, not {len(shared)}"
        raise DataError(f"{done[0].path}: {problem}: {'; '.join(runs.values())}; use the last value")
    return [replace(cell, shared_steps=shared) for cell in cells]


def mean_over_tasks(tables: Sequence[Results]) -> Results:
    """Average the results of each seed over tasks; a seed that lacks a result on any task has none."""
    first, means = tables[0], list[Cell]()
    for label in first.conditions:
        for seed in first.seeds:
            cells = [cell for table in tables if (cell := table.cells.get((label, seed)))]
            # A mean over other tasks than those of the partner would compare tasks, not conditions.
            results = [cell.result for cell in cells if cell.result is not None]
            done = len(results) == len(tables)
            status = "done" if done else "failed" if any(cell.status == "failed" for cell in cells) else "missing"
            curve = ((0, fmean(results)),) if done else ()
            path, start = (cells[0].path, cells[0].start) if cells else (Path(), 0)
            reason = "" if done else "no result on every task"
            means.append(Cell(label, seed, path, status, reason, curve, start=start))
    return replace(first, name=ALL_TASKS, task=ALL_TASKS, cells={(cell.condition, cell.seed): cell for cell in means})
