"""The tests of one family of comparisons: contrasts of two conditions become p-values and kinds of verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
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
        """Return the paired differences of a measure by seed; with several warm starts, see `Results.by_start`."""
        pairs = [pair for pair in self.results.pairs(*self.labels) if None not in map(measure, pair)]
        left, right = ([measure(pair[side]) or 0.0 for pair in pairs] for side in (0, 1))
        seeds = [cell.seed for cell, _ in pairs]
        return self.results.by_start(dict(zip(seeds, statistics.differences(left, right), strict=True)))

    @property
    def sides(self) -> tuple[list[float], list[float]]:
        """Results of the condition and of the other, unpaired; with several warm starts, see `Results.by_start`."""
        values = (
            {seed: cell.result or 0.0 for seed, cell in self.results.done(label).items()} for label in self.labels
        )
        left, right = map(self.results.by_start, values)
        return [*left.values()], [*right.values()]

    @property
    def floor(self) -> float:
        """Half the resolution of the metric: .5 / problems, or else half of the last decimal of the values.

        Three equal differences of values such as .52 are no proof: the seeds differ by less than what was written.
        """
        # Half a problem: a share of n problems changes in steps of 1 / n.
        if problems := max((cell.problems for cell in self.results.runs), default=0):
            return 0.5 / problems
        values = (cell.result for cell in self.results.runs if cell.result is not None)
        # The shortest text that gives the float again has the decimals of the file; those of an integer are none.
        written = [repr(value).removesuffix(".0") for value in values]
        decimals = max((len(text.partition(".")[2]) for text in written if "e" not in text), default=16)
        return 0.5 / 10**decimals

    @property
    def mean(self) -> Mean:
        """Mean difference with its error: paired, or Welch's."""
        if self.results.paired:
            return statistics.mean_of([*self.differences().values()], self.floor)
        return statistics.welch(*self.sides, self.floor)

    def of_seeds(self, seeds: Collection[int]) -> Contrast:
        """Return the contrast over some seeds only."""
        return self._replace(results=self.results.without(lambda cell: cell.seed not in seeds))


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


def judge(
    contrasts: Sequence[Contrast], tested: Sequence[Tested], alpha: float, look: Look | None = None
) -> list[Judged]:
    """Return the verdicts of one family.

    Args:
        contrasts: the comparisons of the family.
        tested: their tests.
        alpha: level to which the corrected p-values refer.
        look: the look of a sequential design; its level is that of the tests of a margin and of the intervals.
    """
    # A look spends its share of alpha; its level is at most that share.
    margin_level = look.level if look else alpha
    bounds = [_margin_tests(contrast, look.level if look else LEVEL) for contrast in contrasts]
    equality, not_worse = (statistics.holm([bound[side] for bound in bounds]) for side in (0, 1))
    judged: list[Judged] = []
    for index, (contrast, test) in enumerate(zip(contrasts, tested, strict=True)):
        # Too few runs for a difference are too few for equality.
        alone = Judged(*test, equality=equality[index], not_worse=not_worse[index]) if test.test else Judged()
        kind: VerdictKind = "open"
        # A shown difference outranks equality: within a margin it is still a difference, which the sentence then says.
        if alone.corrected <= alpha:
            kind = "better" if contrast.results.outcome.sign * contrast.mean.value > 0 else "worse"
        elif alone.equality <= margin_level:
            kind = "equal"
        elif alone.not_worse <= margin_level:
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
        tested = statistics.unpaired_tests([contrast.sides for contrast in contrasts], floors)
    for index, (results, *labels) in enumerate(contrasts):
        runs = [results.done(label) for label in labels]
        # One run of each says nothing about seeds, but the problems that both answered can be tested.
        if all(len(done) == 1 for done in runs):
            answers, others = (next(iter(done.values())).answers for done in runs)
            shared = [problem for problem in answers if problem in others]  # a failed run has no answers
            values = [[side[problem] for problem in shared] for side in (answers, others)]
            tested[index] = statistics.problem_test(values[0], values[1], len(contrasts))
    return tested


def paired_matrix(contrasts: Sequence[Contrast], units: Sequence[int] = ()) -> list[list[float]]:
    """Return the differences as a row for each contrast and a column for each unit, NaN if missing.

    A unit is a seed; with several warm starts, the first seed of each.
    """
    rows = [contrast.differences() for contrast in contrasts]
    # All comparisons share the columns, because a sign vector flips a seed in all of them together.
    columns = units or sorted({unit for row in rows for unit in row})
    return [[row.get(unit, math.nan) for unit in columns] for row in rows]


def _margin_tests(contrast: Contrast, level: float) -> tuple[float, float]:
    """Return the p-values of equality within the margin, and of being not worse by more than it.

    Both are 1 where the printed interval reaches beyond the margin, because it would contradict the verdict.
    """
    outcome = contrast.results.outcome
    if outcome.margin is None or withholding.margin_problem(contrast.results):
        return 1.0, 1.0
    # The one-sided p-values and the interval come from one mean, so that they cannot disagree.
    mean = contrast.mean
    _, low, high = mean.interval(level)
    above = mean.p_not_above(-outcome.margin) if low > -outcome.margin else 1.0
    below = mean.p_not_below(outcome.margin) if high < outcome.margin else 1.0
    return max(above, below), above if outcome.sign > 0 else below
