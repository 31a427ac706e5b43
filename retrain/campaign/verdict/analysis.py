"""From the table of a campaign to estimates per condition and to tested differences between conditions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from statistics import fmean, median
from typing import Any

import numpy as np

from retrain.campaign.verdict import statistics
from retrain.campaign.verdict.results import SPENT, Cell, Results
from retrain.functional.seeds import derive_seed

Measure = Callable[[Cell], "float | None"]
accuracy, _area, _tokens = (attrgetter(name) for name in ("accuracy", "area", "avg_tokens"))
_mean = partial(np.mean, axis=-1)


@dataclass(frozen=True)
class Estimate:
    """A value with its 95% interval; NaN where there are too few runs."""

    value: float
    low: float
    high: float


_NOTHING = Estimate(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Summary:
    """Estimates from the finished runs of a condition.

    Attributes:
        condition: its label.
        done, planned: runs with a result, and runs in the plan.
        mean, iqm: of the final held-out accuracy, with bootstrap intervals over runs.
        area, avg_tokens: means of the runs' learning-curve area and final completion length, with the same intervals.
        reached: runs that reached the threshold; None without a threshold.
        to_threshold: median steps, rollouts, tokens and seconds to the threshold; a run that never reaches it counts
            as later than all others, and the median is infinite when half of the runs or more never do.
        total: mean rollouts, tokens and seconds of a run.
    """

    condition: str
    done: int
    planned: int
    mean: Estimate
    iqm: Estimate
    area: Estimate
    avg_tokens: Estimate
    reached: int | None
    to_threshold: dict[str, float]
    total: dict[str, float]


@dataclass(frozen=True)
class Comparison:
    """A condition against another, paired by seed, in final held-out accuracy.

    Attributes:
        condition, against: labels; differences are condition minus against.
        family: "primary" (declared to be the question), "ladder" (the condition adds something to `against`),
            "baseline" or "tasks". Each family is corrected separately.
        size, alpha: number of comparisons in the family, and its family-wise level.
        seeds: those that finished in both conditions; the others are not used.
        left_out: seeds of the plan without a pair.
        difference: mean of the paired differences with the interval of the paired t-test.
        p, exact: two-sided permutation test by sign flips, and whether all sign patterns were enumerated.
        holm: p corrected for the family.
        effect: Hedges' g of the paired differences.
        improvement: probability that a run of the condition beats one of the other.
        area, avg_tokens: their paired differences, which are not tested.
        needed: seeds that would detect a difference like this one; None if no number of seeds would be enough, or there
            are too few to estimate the effect.
    """

    condition: str
    against: str
    family: str
    size: int
    alpha: float
    seeds: tuple[int, ...]
    left_out: tuple[int, ...]
    difference: Estimate
    p: float
    exact: bool
    effect: float
    improvement: Estimate
    area: Estimate
    avg_tokens: Estimate
    holm: float = 1.0
    needed: int | None = None

    @property
    def same(self) -> bool:
        """Accuracy, area under the curve and tokens are equal in every seed: the condition changed nothing."""
        found = (self.difference, self.area, self.avg_tokens)
        return bool(self.seeds) and all(one.value == 0 and not (one.low < 0 or one.high > 0) for one in found)

    @property
    def significant(self) -> bool:
        """The corrected p is at most the family's level."""
        return self.holm <= self.alpha

    @property
    def untested(self) -> bool:
        """Its interval excludes 0, but there are too few seeds for any outcome to be significant in its family."""
        return len(self.seeds) < self.enough and (self.difference.low > 0 or self.difference.high < 0)

    @property
    def enough(self) -> int:
        """The least number of seeds with which some outcome is significant as the first of its family."""
        return next(n for n in range(2, 99) if self.size * statistics.smallest_p(n) <= self.alpha)


@dataclass(frozen=True)
class Analysis:
    """All numbers of the report.

    Attributes:
        declared: the comparison that `[campaign] primary` names, which is in no other family.
        ladder: every condition against the one that it extends; empty without a plan, or if all extend the
            baseline.
        baseline: every condition against the baseline.
    """

    results: Results
    summaries: tuple[Summary, ...]
    declared: tuple[Comparison, ...]
    ladder: tuple[Comparison, ...]
    baseline: tuple[Comparison, ...]

    @property
    def primary(self) -> tuple[Comparison, ...]:
        """What the verdict reports first: the declared comparison, and the ladder if there is one."""
        return (*self.declared, *(self.ladder or self.baseline))

    @property
    def every(self) -> tuple[Comparison, ...]:
        """All comparisons, family by family."""
        return (*self.declared, *self.ladder, *self.baseline)

    @property
    def secondary(self) -> tuple[Comparison, ...]:
        """The other family, without the comparisons that are in both: a ladder often starts at the baseline."""
        first = {(one.condition, one.against) for one in self.ladder}
        return tuple(one for one in self.baseline if first and (one.condition, one.against) not in first)


def analyze(results: Results) -> Analysis:
    """Summaries of all conditions and both families of comparisons; equal tables give equal numbers."""
    baseline = [(label, results.baseline) for label in results.conditions if label != results.baseline]
    ladder = () if set(results.ladder) == set(baseline) else results.ladder
    declared = [(results.primary, results.baseline)] if results.primary else []
    return Analysis(
        results,
        tuple(summarize(results, label) for label in results.conditions),
        compare(results, declared, "primary"),
        compare(results, [pair for pair in ladder if pair not in declared], "ladder"),
        compare(results, [pair for pair in baseline if pair not in declared], "baseline"),
    )


def compare(results: Results, pairs: Sequence[tuple[str, str]], family: str) -> tuple[Comparison, ...]:
    """A family of comparisons (condition, against), Holm-corrected."""
    return corrected([compared(results, pair, family, len(pairs)) for pair in pairs])


def corrected(found: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """The comparisons of one family with Holm's correction, and the seeds that each would need."""
    adjusted = statistics.holm([one.p for one in found])
    return tuple(replace(one, holm=value, needed=_needed(one)) for one, value in zip(found, adjusted, strict=True))


def summarize(results: Results, condition: str) -> Summary:
    """The condition's estimates over its finished runs."""
    cells = list(results.done(condition).values())
    threshold = results.threshold
    accuracies = _values(cells, accuracy)
    return Summary(
        condition=condition,
        done=len(cells),
        planned=len(results.of(condition)),
        mean=_bootstrapped(accuracies, _mean, condition, "mean"),
        iqm=_bootstrapped(accuracies, statistics.iqm, condition, "iqm"),
        area=_bootstrapped(_values(cells, _area), _mean, condition, "area"),
        avg_tokens=_bootstrapped(_values(cells, _tokens), _mean, condition, "tokens"),
        reached=None if threshold is None else sum(cell.reached(threshold) is not None for cell in cells),
        to_threshold={} if threshold is None else _to_threshold(cells, threshold),
        total={what: fmean(cell.total[i] for cell in cells) if cells else math.nan for i, what in enumerate(SPENT)},
    )


def compared(results: Results, pair: tuple[str, str], family: str, size: int) -> Comparison:
    """The comparison (condition, against), one of `size` in its family, not corrected."""
    condition, against = pair
    pairs = results.pairs(condition, against)
    seeds = tuple(cell.seed for cell, _ in pairs)
    planned = {cell.seed for label in pair for cell in results.of(label)}
    paired = differences(pairs, accuracy)
    own, other = (_values([cells[side] for cells in pairs], accuracy) for side in (0, 1))
    return Comparison(
        condition=condition,
        against=against,
        family=family,
        size=size,
        alpha=results.alpha,
        seeds=seeds,
        left_out=tuple(sorted(planned - set(seeds))),
        difference=mean_estimate(paired),
        p=float(statistics.sign_flip(paired, derive_seed(0, "signs", condition, against))),
        exact=len(seeds) <= statistics.EXACT_SEEDS,
        effect=statistics.effect_size(paired),
        improvement=Estimate(*statistics.improvement(own, other, derive_seed(0, "improvement", condition, against))),
        area=mean_estimate(differences(pairs, _area)),
        avg_tokens=mean_estimate(differences(pairs, _tokens)),
    )


def differences(pairs: Sequence[tuple[Cell, Cell]], measure: Measure) -> list[float]:
    """Of a measure, in every pair where both cells have it."""
    measured = [(measure(cell), measure(other)) for cell, other in pairs]
    return [a - b for a, b in measured if a is not None and b is not None]


def _needed(one: Comparison) -> int | None:
    """Seeds needed at the level that Holm asks of the first of a family.

    More than there are if the difference is not significant, because with these the test has already failed.
    """
    if math.isnan(one.effect):
        return None
    needed = statistics.seeds_needed(one.effect, one.alpha / one.size)
    return needed if needed is None or one.significant else max(needed, len(one.seeds) + 1)


def _to_threshold(cells: Sequence[Cell], threshold: float) -> dict[str, float]:
    """Median cost over runs by name; the cost of a run that does not reach the threshold counts as infinite."""
    names = ("steps", *SPENT)
    steps = [(cell, cell.reached(threshold)) for cell in cells]
    never = (math.inf,) * len(names)
    costs = [never if step is None else (float(step), *cell.spent_after(step)) for cell, step in steps]
    return dict(zip(names, map(median, zip(*costs, strict=True)), strict=False))


def _bootstrapped(values: Sequence[float], statistic: Callable[[Any], Any], *names: str) -> Estimate:
    if not values:
        return _NOTHING
    interval = statistics.bootstrap_interval(values, statistic, derive_seed(0, "bootstrap", *names))
    return Estimate(float(statistic(np.asarray(values))), *interval)


def mean_estimate(values: Sequence[float]) -> Estimate:
    """The mean with its 95% t interval; for differences paired by seed it is that of the paired t-test."""
    if not values:
        return _NOTHING
    low, high = statistics.mean_interval(values)
    return Estimate(fmean(values), float(low), float(high))


def _values(cells: Sequence[Cell], measure: Measure) -> list[float]:
    return [value for cell in cells if (value := measure(cell)) is not None]
