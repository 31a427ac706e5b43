"""The tests of one family of comparisons: contrasts of two conditions become p-values and kinds of verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import fmean
from typing import NamedTuple

from retrain.campaign.verdict import statistics, withholding
from retrain.campaign.verdict.results import Cell, Results
from retrain.campaign.verdict.statistics import LEVEL, Mean, Test, Tested
from retrain.campaign.verdict.verdict_kinds import VerdictKind

Measure = Callable[[Cell], "float | None"]
result, area, length = (attrgetter(name) for name in ("result", "area", "avg_tokens"))


class Contrast(NamedTuple):
    """A condition and the one that it is compared with, in the results of one task and outcome."""

    results: Results
    condition: str
    against: str

    @property
    def labels(self) -> tuple[str, str]:
        """Labels of the two conditions."""
        return self.condition, self.against

    def differences(self, measure: Measure = result) -> dict[int, float]:
        """Return the paired differences of a measure by seed; with several warm starts, their means by warm start."""
        pairs = [pair for pair in self.results.pairs(*self.labels) if None not in map(measure, pair)]
        left, right = ([measure(pair[side]) or 0.0 for pair in pairs] for side in (0, 1))
        values = statistics.differences(left, right)
        starts = [cell.start for cell, _ in pairs]
        if len(set(starts)) < 2:
            return {cell.seed: value for (cell, _), value in zip(pairs, values, strict=True)}
        grouped: dict[int, list[float]] = {}
        for start, value in zip(starts, values, strict=True):
            grouped.setdefault(start, []).append(value)
        return {start: fmean(group) for start, group in grouped.items()}

    @property
    def floor(self) -> float:
        """Half the resolution of the metric: .5 / problems, or else half of the last decimal of the values.

        Three equal differences of values such as .52 are no proof: the seeds differ by less than what was written.
        """
        if problems := max((cell.problems for cell in self.results.runs), default=0):
            return 0.5 / problems
        values = (cell.result for cell in self.results.runs if cell.result is not None)
        decimals = max((len(repr(value).partition(".")[2]) for value in values if "e" not in repr(value)), default=16)
        return 0.5 / 10**decimals

    @property
    def mean(self) -> Mean:
        """Mean difference with its error: paired, or Welch's."""
        if self.results.paired:
            return statistics.mean_of([*self.differences().values()], self.floor)
        return statistics.welch(self.results.values(self.condition), self.results.values(self.against), self.floor)

    def of_seeds(self, seeds: Collection[int]) -> Contrast:
        """Return the contrast over some seeds only."""
        return self._replace(results=self.results.of_seeds(seeds))


@dataclass(frozen=True)
class Look:
    """The look of a sequential design at which a comparison ended, or that it waits for.

    Attributes:
        number, seeds: number of the look, counted from 1, and the seeds that it tests.
        sizes: numbers of seeds of all looks; the last is that of the campaign.
        level: level of the intervals of this look.
        ended: True if the comparison ended here, False if it waits for the runs of this look.
    """

    number: int
    seeds: tuple[int, ...]
    sizes: tuple[int, ...]
    level: float
    ended: bool


@dataclass(frozen=True)
class Judged:
    """Result of the tests of a family for one of its comparisons.

    Attributes:
        test, p, corrected: see `Tested`.
        equality, not_worse: corrected p-values of the two one-sided t tests of the margin; 1 without a margin, and
            where the printed interval reaches beyond it.
        kind: "better" and "worse" are corrected differences; "equal" is within the margin; "not worse" is not worse by
            more than the margin; "same" is for identical runs.
    """

    test: Test = ""
    p: float = 1.0
    corrected: float = 1.0
    equality: float = 1.0
    not_worse: float = 1.0
    kind: VerdictKind = "open"


def judge(contrasts: Sequence[Contrast], tested: Sequence[Tested], alpha: float, level: float = LEVEL) -> list[Judged]:
    """Return the verdicts of one family.

    Args:
        contrasts: the comparisons of the family.
        tested: their tests.
        alpha: level to which the corrected p-values of differences refer.
        level: level of the tests of a margin and of the intervals; with looks that of the look.
    """
    bounds = [_margin_tests(contrast, level) for contrast in contrasts]
    equality, not_worse = (statistics.holm([bound[side] for bound in bounds]) for side in (0, 1))
    judged: list[Judged] = []
    for index, (contrast, test) in enumerate(zip(contrasts, tested, strict=True)):
        alone = Judged(*test, equality=equality[index], not_worse=not_worse[index]) if test.test else Judged()
        kind: VerdictKind = "open"
        if alone.corrected <= alpha:
            kind = "better" if contrast.results.outcome.sign * contrast.mean.value > 0 else "worse"
        elif alone.equality <= level:
            kind = "equal"
        elif alone.not_worse <= level:
            kind = "not worse"
        judged.append(replace(alone, kind=kind))
    return judged


def tests_of(contrasts: Sequence[Contrast]) -> list[Tested]:
    """Return the test that decides on each comparison of a family, with its p-values."""
    if not contrasts:
        return []
    first = contrasts[0].results
    floors = [contrast.floor for contrast in contrasts]
    if first.paired:
        tested = statistics.paired_tests(paired_matrix(contrasts), floors, first.alpha)
    else:
        sides = [(each.results.values(each.condition), each.results.values(each.against)) for each in contrasts]
        tested = statistics.unpaired_tests(sides, floors)
    for index, (results, *labels) in enumerate(contrasts):
        runs = [results.done(label) for label in labels]
        if all(len(done) == 1 for done in runs):
            answers, others = (next(iter(done.values())).answers for done in runs)
            values = [*answers.values()], [others[problem] for problem in answers]
            tested[index] = statistics.problem_test(*values, len(contrasts))
    return tested


def paired_matrix(contrasts: Sequence[Contrast], units: Sequence[int] = ()) -> list[list[float]]:
    """Return the differences as a row for each contrast and a column for each seed (or warm start), NaN if missing."""
    rows = [contrast.differences() for contrast in contrasts]
    columns = units or sorted({unit for row in rows for unit in row})
    return [[row.get(unit, math.nan) for unit in columns] for row in rows]


def _margin_tests(contrast: Contrast, level: float) -> tuple[float, float]:
    """Return the p-values of equality within the margin, and of being not worse by more than it.

    Both are 1 where the printed interval reaches beyond the margin, because it would contradict the verdict.
    """
    outcome = contrast.results.outcome
    if outcome.margin is None or withholding.margin_problem(contrast.results):
        return 1.0, 1.0
    mean = contrast.mean
    _, low, high = mean.interval(level)
    above = mean.p_not_above(-outcome.margin) if low > -outcome.margin else 1.0
    below = mean.p_not_below(outcome.margin) if high < outcome.margin else 1.0
    return max(above, below), above if outcome.sign > 0 else below
