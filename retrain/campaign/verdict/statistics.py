"""The statistics of campaigns, on arrays of numbers. Formulas, choices and measurements: docs/statistics.md.

Every function raises ValueError for values that are infinite, and for NaN where it is not a missing pair, because a
comparison with NaN is False, which a test would count as evidence.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache
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
_STEP = 1e-5  # standard errors to which a detectable shift is computed
_POWER_TABLES, _POWER_SIGNS = 600, 1000  # simulated tables, and sign vectors of each: power to .016, in 0.3 s
_CERTAIN = 1e3  # standard errors; larger shifts overflow the distribution, and smaller ones already have power 1


def _finite(values: Any) -> Array:
    """Return the values as an array; raise ValueError if one is NaN or infinite."""
    data = np.asarray(values, dtype=np.float64)
    if not np.isfinite(data).all():
        raise ValueError(f"{data[~np.isfinite(data)][0]} is not a finite number; leave out runs without a result")
    return data


Test = Literal["", "exact", "t test", "Welch's t test", "McNemar"]


class Tested(NamedTuple):
    """Result of a test.

    Attributes:
        test: "exact" (step-down max-t over sign vectors), "t test" (paired), "Welch's t test" (unpaired), "McNemar",
            or "" for too few runs.
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

    def interval(self, level: float = LEVEL) -> Estimate:
        """Return the mean with its t interval, by default that of 95%: mean -+ t(1 - level / 2; dof) * error."""
        from scipy.special import stdtrit

        # The comparison is False for NaN, the error of fewer than two values, so that the interval is NaN as well.
        half = float(stdtrit(self.dof, 1 - level / 2)) * self.error if self.error >= 0 else math.nan
        return Estimate(self.value, self.value - half, self.value + half)

    def p_not_above(self, bound: float) -> float:
        """One-sided p-value of the t test of the hypothesis that the true mean is at most `bound`."""
        from scipy.special import stdtr

        # Without a known error nothing is shown: NaN must not count as evidence.
        if not self.error >= 0:
            return 1.0
        distance = self.value - bound
        if not self.error:
            return 0.0 if distance > 0 else 1.0
        return float(stdtr(self.dof, -distance / self.error))

    def p_not_below(self, bound: float) -> float:
        """One-sided p-value of the t test of the hypothesis that the true mean is at least `bound`."""
        # Mirrored at 0 it is the other hypothesis, so both sides have one formula.
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

    error^2 = a + b,  a = s_x^2 / n_x,  b = s_y^2 / n_y;  dof = (a + b)^2 / (a^2 / (n_x - 1) + b^2 / (n_y - 1))

    References: Welch, The Generalization of Student's Problem (1947).
    """
    left = mean_of(values, floor)
    right = mean_of(others, floor)
    a = left.error**2
    b = right.error**2
    # A side with one run has the error NaN, and so has the difference.
    if not a + b >= 0:
        return Mean(left.value - right.value, math.nan, 0)
    # Two errors of 0 would give 0 / 0; then the value of equal variances and sizes is taken.
    dof = (a + b) ** 2 / (a**2 / left.dof + b**2 / right.dof) if a + b else left.dof + right.dof
    return Mean(left.value - right.value, math.sqrt(a + b), dof)


def spending(sizes: Sequence[int], alpha: float = LEVEL) -> tuple[float, ...]:
    """Share of alpha that is spent by each look at `sizes` seeds: alpha ln(1 + (e - 1) n_k / n_K).

    References: Lan & DeMets, Discrete Sequential Boundaries for Clinical Trials (1983).
    """
    return tuple(alpha * math.log(1 + (math.e - 1) * size / sizes[-1]) for size in sizes)


@cache
def nominal_levels(sizes: tuple[int, ...], alpha: float = LEVEL) -> tuple[float, ...]:
    """Levels of the intervals of each look, of which all contain the true mean with probability 1 - alpha.

    A mean over more and more seeds is a Brownian motion. Look k is crossed, by motions that crossed no earlier look,
    with the probability that its spending allows; the density of those that remain is propagated on a grid.
    """
    from scipy.special import ndtr

    # Nine standard deviations at the last look: the mass beyond is below the rounding of a float.
    width = 9 * math.sqrt(sizes[-1])
    position = np.linspace(-width, width, 2001)
    # The motion starts at 0 with probability 1; 2001 points are odd, so that one of them is 0.
    mass = np.where(position == 0, 1.0, 0.0)
    levels: list[float] = []
    before = 0.0
    for size, last, spent in zip(sizes, (0, *sizes), spending(sizes, alpha), strict=False):
        step = np.exp(-((position[:, None] - position) ** 2) / (2 * (size - last)))
        mass = step @ mass * (position[1] - position[0]) / math.sqrt(2 * math.pi * (size - last))
        mass *= 1 / (position[1] - position[0]) if last == 0 else 1.0  # from a point to a density
        # The bound is symmetric: positions are taken from both ends inwards until the spending of this look is used up.
        outward = np.argsort(-np.abs(position))
        beyond = np.cumsum(mass[outward]) * (position[1] - position[0])
        bound = float(np.interp(spent - before, beyond, np.abs(position)[outward]))
        # What crossed has ended, and later looks spend only on the rest.
        mass[np.abs(position) >= bound] = 0.0
        levels.append(2 * float(ndtr(-bound / math.sqrt(size))))
        before = spent
    return tuple(levels)


class SequentialFamily:
    """The comparisons of one family under a declared sequential design.

    The sign vectors s are those of all declared seeds. Look k tests T_jk(s), the statistic of comparison j over the
    first n_k seeds. Its bound is the smallest c for which the share of vectors with max_j T_jk >= c, among those that
    crossed no earlier bound, fits into what is left of the spending. The maximum is over the comparisons that are still
    open, so each that ends lowers the bounds of the others. For one look this is the step-down max-t test.

    Args:
        paired: [m, n] differences, columns in the order of the declared seeds; NaN where a pair is missing.
        sizes: numbers of seeds of the looks; the last is n.
        floors: [m], least standard deviations.
        seeds: the declared seeds, from which sign vectors are drawn where they are not enumerated.
        alpha: family-wise level.
        draws: number of sign vectors that are drawn.
    """

    def __init__(
        self,
        paired: Any,
        sizes: Sequence[int],
        floors: Sequence[float],
        seeds: Sequence[int],
        alpha: float = LEVEL,
        draws: int = _DRAWS,
    ) -> None:
        data = np.atleast_2d(np.asarray(paired, dtype=np.float64))
        signs = _signs(sizes[-1], seeds, draws)
        self._spent = spending(sizes, alpha)
        self._evidence = [_evidence(data[:, :size], np.asarray(floors), signs[:, :size]) for size in sizes]
        counts = [(~np.isnan(data[:, :size])).sum(axis=1) for size in sizes]
        self._enters = [count >= min_seeds_for_exact_test(alpha) for count in counts]

    def test(self, look: int, members: Sequence[int], equal: Mapping[int, int]) -> dict[int, float]:
        """Return the corrected p-value of each open comparison at a look, at most alpha if it crosses a bound.

        Args:
            look: index of the look, counted from 0; the runs of this look and of earlier ones are complete.
            members: indices of the open comparisons. Those with too few pairs for the exact test have no value.
            equal: comparisons that ended within a margin -> their look, after which their runs do not count. They stay
                in the maximum: only a difference that was shown may lower the bounds of the others. (Without them .10
                of the families of four without a difference have a false claim, with a margin of 1 sd and three looks.)
        """
        p: dict[int, float] = {}
        remaining = [index for index in members if self._enters[look][index]]
        highest = 0.0
        while remaining:
            values = {index: self._stage_p(look, remaining, equal, index) for index in remaining}
            least = min(values.values())
            if least > self._spent[look]:  # nothing more crosses, so no bound is lowered any further
                return p | {index: max(highest, value) for index, value in values.items()}
            # The most extreme comparison leaves first, ties together: the order of the comparisons must not matter.
            highest = max(highest, least)
            p |= {index: highest for index, value in values.items() if value == least}
            remaining = [index for index in remaining if values[index] > least]
        return p

    def _stage_p(self, look: int, members: Sequence[int], equal: Mapping[int, int], index: int) -> float:
        """Return the share of sign vectors that cross a bound before this look, or are as extreme as observed at it."""
        alive = np.ones(len(self._evidence[0]), dtype=bool)
        p = 1.0
        for number in range(look + 1):
            looks = {each: min(number, equal.get(each, number)) for each in (*members, *equal)}
            entered = [each for each, used in looks.items() if self._enters[used][each]]
            # With too few pairs nobody is tested at this look, and nothing is spent at it.
            if not entered:
                continue
            highest = np.max([self._evidence[looks[each]][:, each] for each in entered], axis=0)
            # Vectors that crossed earlier looks have used up this share of the spending.
            dead = 1 - float(alive.mean())
            if self._enters[number][index]:
                observed = self._evidence[number][0, index]
                p = dead + float((alive & (highest >= observed * (1 - _TIE) - _TIE)).mean()) if observed > 0 else 1.0
                # Its first crossing counts, as for the conditions that really stopped there.
                if p <= self._spent[number]:
                    return p
            # The vectors with the highest values cross this look, as many as the spending allows; ties cross together.
            allowed = self._spent[number] - dead
            ordered = np.sort(highest[alive])[::-1]
            count = int(allowed * len(alive) + _TIE)
            if count < len(ordered):
                bound = ordered[count] * (1 + _TIE) + _TIE
                alive &= highest <= bound
        return p


def unpaired_tests(values: Sequence[tuple[Sequence[float], Sequence[float]]], floors: Sequence[float]) -> list[Tested]:
    """Test the differences of means of one family by Welch's t test, corrected by Holm's method.

    Permuting runs would be wrong in up to .31 of the families without a difference, where the condition with fewer runs
    varies more.
    """
    raw = [welch(*sides, floor).p for sides, floor in zip(values, floors, strict=True)]
    return [
        Tested("Welch's t test", p, corrected) if min(map(len, sides)) > 1 else Tested()
        for sides, p, corrected in zip(values, raw, holm(raw), strict=True)
    ]


def differences(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Return the paired differences, without the rounding errors of binary numbers.

    We round to 15 digits of the largest value, so that 10000.3 - 10000.1 == 0.3 - 0.1: equal decimals must give equal
    differences, because the exact test counts ties.
    """
    left = _finite(values)
    right = _finite(others)
    largest = float(np.abs([left, right]).max(initial=0.0))
    # A float has between 15 and 17 decimal digits, so 15 survive a subtraction of equal decimals.
    digits = -math.ceil(math.log10(largest * 1e-15)) if largest else 0
    return [round(float(difference), digits) for difference in left - right]


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
    # "stable" keeps the order of ties, so that equal input gives equal output on every machine.
    order = np.argsort(-evidence[0], kind="stable")
    highest = np.maximum.accumulate(evidence[:, order[::-1]], axis=1)[:, ::-1]
    p = np.ones(len(data))
    p[order] = np.maximum.accumulate((highest >= evidence[0, order] * (1 - _TIE) - _TIE).mean(axis=0))
    # Without a difference every sign vector is as extreme as the data.
    return np.where(evidence[0] > 0, p, 1.0).tolist()


def _evidence(paired: Array, floor: Any, signs: Array) -> Array:
    """Return the statistic of every comparison under every sign vector, [k, m]; see `max_t`."""
    from scipy.special import stdtr

    filled = np.nan_to_num(paired)
    counts = (~np.isnan(paired)).sum(axis=1)
    squares = (filled**2).sum(axis=1)
    means = signs @ filled.T / np.maximum(counts, 1)
    # Signs do not change squares, so one sum serves the variance under every sign vector.
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


def _signs(count: int, seeds: Sequence[int] = (0,), most: int = _DRAWS) -> Array:
    """Return sign vectors [k, count], the identity first; half of all suffice, because |t(-s)| = |t(s)|.

    Args:
        count: number of seeds or warm starts.
        seeds: seeds of the generator that draws them where they are not enumerated.
        most: number of vectors that are drawn.
    """
    # Bit i of a number is the sign of seed i, and 0, the first number, is the identity.
    if count <= MAX_ENUMERATED_SEEDS:
        return 1.0 - 2.0 * ((np.arange(2 ** max(0, count - 1))[:, None] >> np.arange(count)) & 1)
    drawn = np.random.default_rng(seeds).choice([-1.0, 1.0], size=(most, count))
    # With the identity among the draws no p-value is 0, which no finite sample could show (Phipson & Smyth).
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


def mcnemar(values: Sequence[float], others: Sequence[float]) -> float:
    """Two-sided p-value of McNemar's exact test: the same problems, each right (1) or wrong (0) by two models.

    Of the problems on which the models differ, half are expected to be right by either.

    References: McNemar, Note on the Sampling Error of the Difference Between Correlated Proportions (1947).
    """
    from scipy.stats import binomtest

    change = _finite(values) - _finite(others)
    # Problems that both models get right or wrong say nothing about which is better.
    differ = int((change != 0).sum())
    return float(binomtest(int((change > 0).sum()), differ, 0.5).pvalue) if differ else 1.0


def problem_test(values: Sequence[float], others: Sequence[float], size: int) -> Tested:
    """Test two models by the same problems, right or wrong; no test for other values, or fewer than two problems."""
    if len(values) < 2 or not {*values, *others} <= {0.0, 1.0}:
        return Tested()
    p = mcnemar(values, others)
    return Tested("McNemar", p, min(1.0, size * p))


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


def hedges_g(paired: Sequence[float]) -> float:
    """Paired effect size with Hedges' correction: g = (1 - 3 / (4 (n-1) - 1)) * mean(d) / sd(d).

    Returns:
        g; NaN for fewer than three differences; infinite, with the mean's sign, for equal differences other than 0.
    References: Hedges, Distribution Theory for Glass's Estimator (1981).
    """
    data = _finite(paired)
    if len(data) < 3:
        return math.nan
    mean, deviation = float(data.mean()), float(data.std(ddof=1))
    # Equal differences have a deviation of rounding errors, and g would be a meaningless large number.
    if deviation <= 1e-12 * abs(mean):
        return math.copysign(math.inf, mean) if mean else 0.0
    return (1 - 3 / (4 * (len(data) - 1) - 1)) * mean / deviation


def min_seeds_for_exact_test(alpha: float = LEVEL) -> int:
    """Smallest number of seeds with which the exact test can be significant, 2 / 2^n <= alpha: 6 at .05."""
    return 1 - math.floor(math.log2(alpha))


@cache
def detectable_effect(seeds: int, size: int = 1, alpha: float = LEVEL) -> float:
    """Smallest true difference that is detected with probability POWER, in standard deviations; infinite if none is.

    It is the difference of one of `size` methods that share a baseline, all with this number of seeds, normal. For the
    t test the power is P(|T| > t(1 - alpha / (2 size); n-1)) with T noncentral; that of the exact test is simulated.
    """
    if seeds < MIN_SEEDS:
        return math.inf
    # The t test's formula gives an effect on the mean, in its errors; the deviation of a difference is sqrt(n) times
    # that.
    if seeds < min_seeds_for_exact_test(alpha):
        return detectable_shift(seeds - 1, size, alpha) / math.sqrt(seeds)
    power = _exact_power(seeds, size, alpha)
    # The power of 600 tables is a step function of the effect, so that finer steps than 0.005 would be noise.
    return bisect_left(range(10_000), POWER, key=lambda step: power(step * 0.005)) * 0.005


def detectable_shift(dof: float, size: int = 1, alpha: float = LEVEL) -> float:
    """Smallest true difference that the t test at level alpha / size detects with probability POWER, in its errors."""
    return (
        bisect_left(range(round(_CERTAIN / _STEP)), POWER, key=lambda step: t_power(dof, step * _STEP, size, alpha))
        * _STEP
    )


def t_power(dof: float, shift: float, size: int = 1, alpha: float = LEVEL) -> float:
    """Probability that the t test at level alpha / size detects a difference of `shift` standard errors."""
    from scipy.special import nctdtr, stdtrit

    critical = float(stdtrit(dof, 1 - alpha / (2 * size)))
    # scipy gives NaN where the probability underflows, far out in a tail.
    above, below = (float(np.nan_to_num(nctdtr(dof, abs(shift), bound))) for bound in (critical, -critical))
    return 1 - above + below


def _exact_power(seeds: int, size: int, alpha: float) -> Callable[[float], float]:
    """Return the power of the max-t test as a function of the effect on the first of `size` methods, simulated."""
    rng = np.random.default_rng([seeds, size])
    signs = _signs(seeds)
    # The identity stays, because the observed statistic is that of the first vector.
    signs = signs[np.r_[0, rng.choice(np.arange(1, len(signs)), min(_POWER_SIGNS, len(signs) - 1), replace=False)]]
    noise = rng.normal(size=(size + 1, _POWER_TABLES, seeds))
    # A shared baseline correlates the differences by .5; divided by sqrt(2) each has the deviation 1.
    paired = (noise[1:] - noise[0]) / math.sqrt(2)
    others = np.maximum.reduce([_evidence(each, 0.0, signs) for each in paired[1:]]) if size > 1 else 0.0

    def power(effect: float) -> float:
        t = _evidence(paired[0] + effect, 0.0, signs)  # [signs, tables]
        # The first step of max-t suffices: only the largest statistic of a family is tested against all others.
        p = (np.maximum(t, others) >= t[0] * (1 - _TIE)).mean(axis=0)
        return float((p <= alpha).mean())

    return power


def seeds_needed(margin: float, deviation: float, size: int = 1, alpha: float = LEVEL) -> int | None:
    """Smallest number of seeds that show equality within a margin with probability POWER, if the methods are equal.

    Two one-sided t tests have to be significant, and the 95% interval has to lie within the margin. The power at a true
    difference of 0 is about 2 F(margin sqrt(n) / deviation - t(1 - min(alpha / size, .025); n-1)) - 1 with the t
    distribution F.

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
        # A deviation of almost 0 would overflow; above _CERTAIN standard errors the power is 1 anyway.
        distance = margin * math.sqrt(seeds) / max(deviation, margin / _CERTAIN)
        return 2 * float(stdtr(seeds - 1, distance - stdtrit(seeds - 1, 1 - min(alpha / size, LEVEL / 2)))) - 1

    enough = bisect_left(range(_MOST_SEEDS + 1), POWER, lo=MIN_SEEDS, key=reached)
    return enough if enough <= _MOST_SEEDS else None
