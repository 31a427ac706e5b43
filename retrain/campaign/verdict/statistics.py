"""The statistics of campaigns, on arrays of numbers. Formulas, choices and measurements: docs/statistics.md.

Every function raises ValueError for values that are infinite, and for NaN where it is not a missing pair, because a
comparison with NaN is False, which a test would count as evidence.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

LEVEL = 0.05
"""Default family-wise level of the tests; intervals have the level 1 - LEVEL."""

POWER = 0.8
"""Power (probability of detecting a true difference) of the differences and numbers of seeds that reports name."""

MAX_ENUMERATED_SEEDS = 14
"""Up to this many seeds all 2^n sign vectors are enumerated."""

MIN_SEEDS = 3
"""With fewer seeds there is no verdict."""

_DRAWS = 20_000  # sign vectors or permutations where they are not enumerated
_MOST_SEEDS = 100_000  # upper bound of the numbers of seeds needed
_TIE = 1e-9  # relative difference of test statistics that counts as rounding
_STEP = 1e-7  # standard deviations to which a detectable effect is computed
_CERTAIN = 1e3  # standard deviations; larger effects overflow the distribution, and smaller ones already have power 1


def _finite(values: Any) -> Array:
    """Return the values as an array; raise ValueError if one is NaN or infinite."""
    data = np.asarray(values, dtype=np.float64)
    if not np.isfinite(data).all():
        raise ValueError(f"{data[~np.isfinite(data)][0]} is not a finite number; leave out runs without a result")
    return data


Test = Literal["", "exact", "t test", "permutation", "McNemar"]


class Tested(NamedTuple):
    """Result of a test.

    Attributes:
        test: "exact" (step-down max-t over sign vectors), "t test", "permutation" (unpaired), "McNemar", or "" for
            fewer than three seeds.
        p: p-value of the comparison alone.
        corrected: p-value corrected for the family.
    """

    test: Test = ""
    p: float = 1.0
    corrected: float = 1.0


class Estimate(NamedTuple):
    """A value with its 95% interval; NaN where there are too few runs."""

    value: float
    low: float
    high: float


class Mean(NamedTuple):
    """A mean, or a difference of two means.

    Attributes:
        value: the mean; NaN without a value.
        error: its standard error; NaN for fewer than two values.
        dof: degrees of freedom of the error.
    """

    value: float
    error: float
    dof: float

    @property
    def interval(self) -> Estimate:
        """The mean with its 95% t interval: mean -+ t(0.975; dof) * error."""
        from scipy.special import stdtrit

        half = float(stdtrit(self.dof, 1 - LEVEL / 2)) * self.error if self.error >= 0 else math.nan
        return Estimate(self.value, self.value - half, self.value + half)

    def p_not_above(self, bound: float) -> float:
        """One-sided p-value of the t test of the hypothesis that the true mean is at most `bound`."""
        from scipy.special import stdtr

        if not self.error >= 0:
            return 1.0
        distance = self.value - bound
        if not self.error:
            return 0.0 if distance > 0 else 1.0
        return float(stdtr(self.dof, -distance / self.error))

    def p_not_below(self, bound: float) -> float:
        """One-sided p-value of the t test of the hypothesis that the true mean is at least `bound`."""
        return Mean(-self.value, self.error, self.dof).p_not_above(-bound)

    @property
    def p(self) -> float:
        """Two-sided p-value of the t test of the hypothesis that the true mean is 0; 1 for a mean of 0."""
        return min(1.0, 2 * min(self.p_not_above(0), self.p_not_below(0)))


def mean_of(values: Sequence[float], floor: float = 0.0) -> Mean:
    """Return the mean of values with its error: s / sqrt(n), n - 1 degrees of freedom.

    For differences paired by seed this is the paired t-test.

    Args:
        values: [n], one per seed or run.
        floor: least standard deviation: that of the resolution of a measurement.
    """
    data = _finite(values)
    if not len(data):
        return Mean(math.nan, math.nan, 0)
    if len(data) < 2:
        return Mean(float(data[0]), math.nan, 0)
    return Mean(float(data.mean()), max(float(data.std(ddof=1)), floor) / math.sqrt(len(data)), len(data) - 1)


def welch(values: Sequence[float], others: Sequence[float], floor: float = 0.0) -> Mean:
    """Return the difference of two means of unpaired runs, with Welch's error and degrees of freedom.

    error^2 = a + b,  a = s_x^2 / n_x,  b = s_y^2 / n_y;  free = (a + b)^2 / (a^2 / (n_x - 1) + b^2 / (n_y - 1))

    References: Welch, The Generalization of Student's Problem (1947).
    """
    left, right = mean_of(values, floor), mean_of(others, floor)
    a, b = left.error**2, right.error**2
    if not a + b >= 0:
        return Mean(left.value - right.value, math.nan, 0)
    free = (a + b) ** 2 / (a**2 / left.dof + b**2 / right.dof) if a + b else left.dof + right.dof
    return Mean(left.value - right.value, math.sqrt(a + b), free)


def differences(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the paired differences, rounded to a grid of powers of ten that is coarser than their rounding errors.

    Each value is stored with a relative error of 1.1e-16, so 10000.3 - 10000.1 and 0.2 differ by 1e-12. On a grid of
    at least 1e-15 of the largest value, differences that are equal in decimals are equal.
    """
    left, right = _finite(values), _finite(others)
    largest = float(np.abs([left, right]).max(initial=0.0))
    digits = -math.ceil(math.log10(largest * 1e-15)) if largest else 0
    return [round(float(one), digits) for one in left - right]


def max_t(paired: Any, floor: Any = 0.0) -> list[float]:
    """p-values of m comparisons over n seeds, corrected by the step-down max-t procedure.

    All comparisons of a seed are flipped together by the sign vector s:

    t_j(s) = |mean_i(s_i d_ji)| / sqrt(var_i(s_i d_ji) / n_j)
    T_j(s) = -log p of t_j(s) by the t distribution with n_j - 1 degrees of freedom
    p_(k) = share of s with max of T(s) over the k-th and all later comparisons >= T_(k)(1), made monotone

    where the comparisons are ordered by T_j(1), largest first. For one comparison this is the sign-flip test. The
    smallest value is 2 / 2^n for any m. All sign vectors are enumerated up to MAX_ENUMERATED_SEEDS seeds; beyond,
    20,000 are drawn with a fixed seed, the identity among them.

    Args:
        paired: [m, n] differences in any unit; NaN where a pair is missing, which is left out of the comparison.
        floor: least standard deviation, or [m]: that of the resolution of a measurement.
    Returns:
        [m]; 1 for a comparison with fewer than two pairs or without any difference. Exact if flipping all signs of one
        seed does not change the joint distribution under the null. That always holds for one method on several tasks;
        for several methods against one baseline it assumes symmetry.
    References: Westfall & Young, Resampling-Based Multiple Testing (1993), algorithm 2.8; Fisher, The Design of
        Experiments (1935); Phipson & Smyth, arXiv:1603.05766 (the identity among the draws).
    """
    data = np.atleast_2d(np.asarray(paired, dtype=np.float64))
    if np.isinf(data).any():
        raise ValueError("inf is not a finite number; leave out runs without a result")
    evidence = _evidence(data, floor, _signs(data.shape[1]))
    order = np.argsort(-evidence[0], kind="stable")
    highest = np.maximum.accumulate(evidence[:, order[::-1]], axis=1)[:, ::-1]
    p = np.ones(len(data))
    p[order] = np.maximum.accumulate((highest >= evidence[0, order] * (1 - _TIE) - _TIE).mean(axis=0))
    return np.where(evidence[0] > 0, p, 1.0).tolist()


def _evidence(paired: Array, floor: Any, signs: Array) -> Array:
    """Return the statistic of every comparison under every sign vector, [k, m]; see `max_t`."""
    from scipy.special import stdtr

    filled = np.nan_to_num(paired)
    counts = (~np.isnan(paired)).sum(axis=1)
    squares = (filled**2).sum(axis=1)
    means = signs @ filled.T / np.maximum(counts, 1)
    variance = (squares - counts * means**2) / np.maximum(counts - 1, 1)
    # The second floor, a millionth of the differences, keeps equal differences from giving infinity.
    least = np.maximum(np.square(floor), 1e-12 * squares / np.maximum(counts, 1))
    with np.errstate(invalid="ignore", divide="ignore"):
        t = np.abs(means) * np.sqrt(counts) / np.sqrt(np.maximum(variance, least))
        t[:, (counts < 2) | (squares == 0)] = 0.0
        if len(set(counts.tolist())) == 1:
            return t  # -log p increases with t, so the p-values are the same, and t is faster
        # With few pairs t itself is extreme in one of 2^(pairs - 1) sign vectors, and would hide all other comparisons.
        return -np.log(2 * stdtr(np.maximum(counts - 1, 1), -t))


def _signs(count: int) -> Array:
    """Return sign vectors [k, count], the identity first; half of all suffice, because |t(-s)| = |t(s)|."""
    if count <= MAX_ENUMERATED_SEEDS:
        return 1.0 - 2.0 * ((np.arange(2 ** max(0, count - 1))[:, None] >> np.arange(count)) & 1)
    drawn = np.random.default_rng(0).choice([-1.0, 1.0], size=(_DRAWS, count))
    drawn[0] = 1.0
    return drawn


def paired_tests(paired: Any, floors: Sequence[float], alpha: float = LEVEL) -> list[Tested]:
    """Test the comparisons of one family, each by the test that its number of pairs allows.

    Only comparisons with enough pairs for the exact test enter max-t, because a comparison with k pairs reaches its
    largest statistic in 2^(1-k) of the sign vectors, and would make all others inconclusive.

    Args:
        paired: [m, n] differences; NaN where a pair is missing.
        floors: [m], least standard deviations.
        alpha: family-wise level.
    """
    data = np.atleast_2d(np.asarray(paired, dtype=np.float64))
    counts = (~np.isnan(data)).sum(axis=1)
    students = [mean_of(row[~np.isnan(row)].tolist(), floor).p for row, floor in zip(data, floors, strict=True)]
    exact = np.flatnonzero(counts >= min_seeds_for_exact_test(alpha))
    tested = [
        Tested("t test", p, corrected) if count >= MIN_SEEDS else Tested()
        for count, p, corrected in zip(counts, students, holm(students), strict=True)
    ]
    corrected = max_t(data[exact], np.asarray(floors)[exact]) if len(exact) else []
    for index, value in zip(exact.tolist(), corrected, strict=True):
        tested[index] = Tested("exact", max_t(data[index], floors[index])[0], value)
    return tested


def permutation(values: Sequence[float], others: Sequence[float]) -> float:
    """Two-sided p-value of the permutation test of the difference of two means, for runs that do not pair.

    The share of the ways to divide all runs into groups of these sizes whose means differ by at least as much; exact up
    to 20,000 ways, sampled beyond. 4 + 4 runs reach 2 / 70 = .029.

    Returns:
        p; 1 if a group is empty.
    """
    left, right = _finite(values), _finite(others)
    if not (len(left) and len(right)):
        return 1.0
    pool, size = np.concatenate([left, right]), len(left)
    if math.comb(len(pool), size) <= _DRAWS:
        chosen = np.array([*combinations(range(len(pool)), size)])
    else:
        chosen = np.random.default_rng(0).random((_DRAWS, len(pool))).argsort(axis=1)[:, :size]
        chosen[0] = np.arange(size)
    sums = pool[chosen].sum(axis=1)
    distance = np.abs(sums / size - (pool.sum() - sums) / len(right))
    return float((distance >= distance[0] - _TIE * np.abs(pool).max()).mean())


def mcnemar(values: Sequence[float], others: Sequence[float]) -> float:
    """Two-sided p-value of McNemar's exact test: the same problems, each right (1) or wrong (0) by two models.

    Of the problems on which the models differ, half are expected to be right by either.

    References: McNemar, Note on the Sampling Error of the Difference Between Correlated Proportions (1947).
    """
    from scipy.stats import binomtest

    change = _finite(values) - _finite(others)
    differ = int((change != 0).sum())
    return float(binomtest(int((change > 0).sum()), differ, 0.5).pvalue) if differ else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction. It bounds the family-wise error rate, also for dependent tests.

    p~_(i) = max_{j <= i} min(1, (m - j + 1) p_(j)),  p sorted ascending

    Returns:
        Adjusted values in the given order.
    References: Holm, A Simple Sequentially Rejective Multiple Test Procedure (1979).
    """
    adjusted, floor = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(_finite(p_values), kind="stable").tolist()):
        floor = max(floor, min(1.0, (len(p_values) - rank) * float(p_values[index])))
        adjusted[index] = floor
    return adjusted


def improvement(values: Sequence[float], others: Sequence[float]) -> Estimate:
    """Probability of improvement: P(X > Y) + P(X = Y) / 2 for a run of one condition and a run of the other.

    Computed from ranks. The variance is that of the placements of the runs of each condition among those of the other,
    and the interval is a t interval with min(n, m) - 1 degrees of freedom, cut to [0, 1].

    Args:
        values: results X of the runs of one condition.
        others: results Y of the runs of the other condition.
    Returns:
        The value, NaN if a condition has no run. The interval is NaN if a condition has fewer than five runs, because
        with three it covers only .68 to .80.
    References: Agarwal et al., arXiv:2108.13264; DeLong et al., Comparing the Areas under ROC Curves (1988).
    """
    from scipy.stats import rankdata

    left, right = _finite(values), _finite(others)
    if not (len(left) and len(right)):
        return Estimate(math.nan, math.nan, math.nan)
    ranks = rankdata(np.concatenate([left, right]))
    above = (ranks[: len(left)] - rankdata(left)) / len(right)
    value, fewest = float(above.mean()), min(len(left), len(right))
    if fewest < 5:
        return Estimate(value, math.nan, math.nan)
    under = 1 - (ranks[len(left) :] - rankdata(right)) / len(left)
    error = math.sqrt(above.var(ddof=1) / len(left) + under.var(ddof=1) / len(right))
    _, low, high = Mean(value, error, fewest - 1).interval
    return Estimate(value, max(0.0, low), min(1.0, high))


def effect_size(paired: Sequence[float]) -> float:
    """Paired effect size with Hedges' correction: g = (1 - 3 / (4 (n-1) - 1)) * mean(d) / sd(d).

    Returns:
        g; NaN for fewer than three differences; infinite, with the mean's sign, for equal differences other than 0.
    References: Hedges, Distribution Theory for Glass's Estimator (1981).
    """
    data = _finite(paired)
    if len(data) < 3:
        return math.nan
    mean, deviation = float(data.mean()), float(data.std(ddof=1))
    if deviation <= 1e-12 * abs(mean):
        return math.copysign(math.inf, mean) if mean else 0.0
    return (1 - 3 / (4 * (len(data) - 1) - 1)) * mean / deviation


def min_seeds_for_exact_test(alpha: float = LEVEL) -> int:
    """Smallest number of seeds with which the exact test can be significant, 2 / 2^n <= alpha: 6 at .05."""
    return 1 - math.floor(math.log2(alpha))


def power(seeds: int, effect: float, size: int = 1, alpha: float = LEVEL) -> float:
    """Probability of detecting a difference of `effect` standard deviations of the paired difference.

    The differences are assumed to be normal. It is the power of the paired t test at level alpha / size,
    P(|T| > t(1 - alpha / (2 size); n-1)) with T noncentral and delta = effect * sqrt(n): exact for the t test of the
    first comparison, and within .1 of the simulated power of the max-t test. With so few seeds that the exact test is
    significant only if all differences have the same sign, it is multiplied by Phi(effect)^n + Phi(-effect)^n.

    Args:
        seeds: number n of paired seeds; 0 for fewer than three, which have no verdict.
        effect: true mean of the difference divided by its standard deviation.
        size: number of comparisons in the family.
        alpha: family-wise level.
    """
    from scipy.special import nctdtr, ndtr, stdtrit

    if seeds < MIN_SEEDS:
        return 0.0
    shift, free = min(abs(effect), _CERTAIN) * math.sqrt(seeds), seeds - 1
    critical = float(stdtrit(free, 1 - alpha / (2 * size)))
    found = 1 - float(np.nan_to_num(nctdtr(free, shift, critical)))
    found += float(np.nan_to_num(nctdtr(free, shift, -critical)))
    if seeds == min_seeds_for_exact_test(alpha):
        found *= float(ndtr(abs(effect)) ** seeds + ndtr(-abs(effect)) ** seeds)
    return found


def detectable_effect(seeds: int, size: int = 1, alpha: float = LEVEL) -> float:
    """Smallest true difference that is detected with probability POWER, in standard deviations; infinite if none is."""
    if seeds < MIN_SEEDS:
        return math.inf
    steps = range(round(_CERTAIN / _STEP))
    return bisect_left(steps, POWER, key=lambda step: power(seeds, step * _STEP, size, alpha)) * _STEP


def seeds_needed(margin: float, deviation: float, size: int = 1, alpha: float = LEVEL) -> int | None:
    """Smallest number of seeds that show equality within a margin with probability POWER, if the methods are equal.

    The power of the two one-sided t tests at a true difference of 0 is about
    2 F(margin sqrt(n) / deviation - t(1 - alpha / size; n-1)) - 1 with the t distribution F.

    Args:
        margin: largest difference that counts as equal, in the unit of the result.
        deviation: standard deviation over seeds of the paired difference.
        size: number of comparisons in the family.
        alpha: family-wise level.
    Returns:
        The number; None if 100,000 seeds are too few.
    References: Schuirmann, A Comparison of the Two One-Sided Tests Procedure (1987).
    """
    from scipy.special import stdtr, stdtrit

    def reached(seeds: int) -> float:
        distance = margin * math.sqrt(seeds) / max(deviation, margin / _CERTAIN)
        return 2 * float(stdtr(seeds - 1, distance - stdtrit(seeds - 1, 1 - alpha / size))) - 1

    found = bisect_left(range(_MOST_SEEDS + 1), POWER, lo=MIN_SEEDS, key=reached)
    return found if found <= _MOST_SEEDS else None
