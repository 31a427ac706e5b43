"""Estimates for each condition of a campaign, and tested differences between conditions."""

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
from retrain.functional.evaluation import aes
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
        mean, iqm: mean and interquartile mean of the final held-out accuracy, with bootstrap intervals over runs.
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
    """Comparison of two conditions in the final result of their runs, paired by seed.

    Attributes:
        condition, against: labels; differences are condition minus against.
        family: "primary" (the declared comparison), "ladder" (the condition extends `against`), "baseline", "pooled"
            (the mean over tasks) or "tasks". Each family is corrected separately.
        size, alpha: number of comparisons in the family, and its family-wise level.
        metric: name of the measured quantity; larger is better.
        seeds: seeds that finished in both conditions; only these are compared.
        starts: number of warm starts of these runs. With several, the differences of one warm start are averaged and
            count as one observation.
        left_out: seeds of the plan without a pair.
        difference: mean of the paired differences with the interval of the paired t-test.
        p, exact: p-value of the two-sided sign-flip permutation test; True if all sign patterns were enumerated.
        holm: p corrected for the family.
        effect: Hedges' g of the paired differences.
        improvement: probability that a run of the condition beats one of the other.
        area, avg_tokens: their paired differences, which are not tested.
        aes: accuracy-efficiency score of each run of the condition against its pair (see `functional.evaluation.aes`).
        detectable: smallest true difference that these seeds detect with a power of 80 % at level alpha / size;
            infinite if they detect none.
        needed: number of seeds to detect a difference of this size; None if no number suffices, or if there are too few
            seeds to estimate the effect.
    """

    condition: str
    against: str
    family: str
    size: int
    alpha: float
    metric: str
    seeds: tuple[int, ...]
    starts: int
    left_out: tuple[int, ...]
    difference: Estimate
    p: float
    exact: bool
    effect: float
    improvement: Estimate
    area: Estimate
    avg_tokens: Estimate
    aes: Estimate = _NOTHING
    holm: float = 1.0
    needed: int | None = None
    detectable: float = math.nan

    @property
    def same(self) -> bool:
        """True if accuracy, area under the curve and tokens are equal in every seed."""
        found = (self.difference, self.area, self.avg_tokens)
        return bool(self.seeds) and all(one.value == 0 and not (one.low < 0 or one.high > 0) for one in found)

    @property
    def lengths_differ(self) -> bool:
        """True if the interval of the difference in tokens excludes 0; without an interval, for any difference."""
        found = self.avg_tokens
        return found.low > 0 or found.high < 0 or (math.isnan(found.low) and abs(found.value) > 0)

    @property
    def significant(self) -> bool:
        """True if the corrected p-value is at most the family's level."""
        return self.holm <= self.alpha

    @property
    def count(self) -> int:
        """Number of independent differences: seeds, or warm starts if there are several."""
        return self.starts if self.starts > 1 else len(self.seeds)

    @property
    def untested(self) -> bool:
        """True if the interval excludes 0, but no result can be significant with so few seeds in this family."""
        return self.count < self.enough and (self.difference.low > 0 or self.difference.high < 0)

    @property
    def enough(self) -> int:
        """Smallest number of seeds for which a result can be significant at level alpha / size."""
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
        """Comparisons that the verdict reports first: the declared one, and the ladder if there is one."""
        return (*self.declared, *(self.ladder or self.baseline))

    @property
    def every(self) -> tuple[Comparison, ...]:
        """All comparisons, family by family."""
        return (*self.declared, *self.ladder, *self.baseline)

    @property
    def secondary(self) -> tuple[Comparison, ...]:
        """Comparisons with the baseline that are not also in the ladder; empty without a ladder."""
        first = {(one.condition, one.against) for one in self.ladder}
        return tuple(one for one in self.baseline if first and (one.condition, one.against) not in first)


def analyze(results: Results) -> Analysis:
    """Compute summaries of all conditions and all families of comparisons. The result is deterministic."""
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
    """Compare the pairs (condition, against) as one family, with Holm's correction."""
    return corrected([compared(results, pair, family, len(pairs)) for pair in pairs])


def corrected(found: Sequence[Comparison]) -> tuple[Comparison, ...]:
    """Add Holm's correction and the needed number of seeds to the comparisons of one family."""
    adjusted = statistics.holm([one.p for one in found])
    return tuple(replace(one, holm=value, needed=_needed(one)) for one, value in zip(found, adjusted, strict=True))


def summarize(results: Results, condition: str) -> Summary:
    """Estimate the results and costs of a condition from its finished runs."""
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
        total={cost: fmean(cell.total[i] for cell in cells) if cells else math.nan for i, cost in enumerate(SPENT)},
    )


def compared(results: Results, pair: tuple[str, str], family: str, size: int) -> Comparison:
    """Compare a pair (condition, against) without correction.

    Args:
        results: results of the runs.
        pair: labels.
        family: name of the family.
        size: number of comparisons in the family.
    """
    condition, against = pair
    pairs = results.pairs(condition, against)
    seeds = tuple(cell.seed for cell, _ in pairs)
    planned = {cell.seed for label in pair for cell in results.of(label)}
    paired = differences(pairs, accuracy)
    own, other = (_values([cells[side] for cells in pairs], accuracy) for side in (0, 1))
    # Integers are stored exactly, so that their differences have no rounding that would need a tolerance.
    scale = max((abs(value) for value in (*own, *other) if not float(value).is_integer()), default=0.0)
    return Comparison(
        condition=condition,
        against=against,
        family=family,
        size=size,
        alpha=results.alpha,
        metric=results.metric,
        seeds=seeds,
        starts=len({cell.start for cell, _ in pairs}),
        left_out=tuple(sorted(planned - set(seeds))),
        difference=mean_estimate(paired),
        p=float(statistics.sign_flip(paired, derive_seed(0, "signs", condition, against), scale)),
        detectable=statistics.detectable_effect(len(paired), statistics.deviation(paired), results.alpha / size),
        exact=len(paired) <= statistics.EXACT_SEEDS,
        effect=statistics.effect_size(paired, scale),
        improvement=Estimate(*statistics.improvement(own, other, derive_seed(0, "improvement", condition, against))),
        area=mean_estimate(differences(pairs, _area)),
        avg_tokens=mean_estimate(differences(pairs, _tokens)),
        aes=mean_estimate([value for cell, other in pairs if (value := _aes(cell, other)) is not None]),
    )


def _aes(cell: Cell, base: Cell) -> float | None:
    """Return the accuracy-efficiency score of a run against another; None if an evaluation has no length."""
    measured = (cell.accuracy, base.accuracy, cell.avg_tokens, base.avg_tokens)
    known = [value for value in measured if value is not None]
    return aes(*known)[0] if len(known) == len(measured) else None


def differences(pairs: Sequence[tuple[Cell, Cell]], measure: Measure) -> list[float]:
    """Return the differences of a measure in the pairs that have it; with several warm starts, their means."""
    measured = [(cell.start, measure(cell), measure(other)) for cell, other in pairs]
    found = [(start, a - b) for start, a, b in measured if a is not None and b is not None]
    starts = list(dict.fromkeys(start for start, _ in found))
    if len(starts) < 2:
        return [difference for _, difference in found]
    return [fmean(difference for own, difference in found if own == start) for start in starts]


def _needed(one: Comparison) -> int | None:
    """Return the number of seeds needed at alpha / size, the strictest level of Holm's procedure.

    If the difference is not significant, the result is larger than the present number of seeds.
    """
    if math.isnan(one.effect):
        return None
    needed = statistics.seeds_needed(one.effect, one.alpha / one.size)
    return needed if needed is None or one.significant else max(needed, one.count + 1)


def _to_threshold(cells: Sequence[Cell], threshold: float) -> dict[str, float]:
    """Return the median cost until the threshold by name; a run that never reaches it has infinite cost."""
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
    """Return the mean with its 95% t interval; for paired differences it is that of the paired t-test."""
    if not values:
        return _NOTHING
    low, high = statistics.mean_interval(values)
    return Estimate(fmean(values), float(low), float(high))


def _values(cells: Sequence[Cell], measure: Measure) -> list[float]:
    return [value for cell in cells if (value := measure(cell)) is not None]
