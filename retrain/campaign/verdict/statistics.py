"""The statistics of campaigns, on arrays of numbers. Formulas, choices and measurements: docs/statistics.md.

Functions of paired differences work along the last axis, so that many tables are analyzed at once. Every function
raises ValueError for data that are not finite, because a comparison with NaN is False, which a test would count as
evidence.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

LEVEL = 0.05
"""Significance level of every test; intervals have the level 1 - LEVEL."""

POWER = 0.8
"""Power (probability of detecting a true difference) of the numbers of seeds that reports recommend."""

EXACT_SEEDS = 16
"""Up to this many seeds all 2^n sign patterns are enumerated."""

_DRAWS = 10_000  # bootstrap samples
_PATTERNS = 100_000  # random sign patterns
_MOST_SEEDS = 100_000  # upper bound of `seeds_needed`
_TABLES = 4_000  # simulated tables for the power
_SUMS = 2**20  # sums of subsets that are computed at a time, in 8 MB
_SMOOTH = 100  # with this many significant subsets, the test's power equals that of the t-test to 0.005
_ROUNDING = 2e-15  # of a difference, in units of the subtracted values: each is stored with an error of 1.1e-16
_CERTAIN = 1e3  # standard deviations; larger effects overflow the distribution, and smaller ones already have power 1


def _finite_array(values: Any) -> Array:
    """Return the values as an array; raise ValueError if one is NaN or infinite."""
    data = np.asarray(values, dtype=np.float64)
    if not np.isfinite(data).all():
        raise ValueError(f"{data[~np.isfinite(data)][0]} is not a finite number; leave out runs without a result")
    return data


def iqm(values: Any) -> Any:
    """Interquartile mean: the mean without the smallest and the largest quarter of the values.

    iqm(x) = mean(x_(k+1), ..., x_(n-k)),  k = floor(n / 4)

    Args:
        values: [..., n] in any unit; fewer than four values are averaged as they are.
    References: Agarwal et al., Deep RL at the Edge of the Statistical Precipice, arXiv:2108.13264.
    """
    ordered = np.sort(_finite_array(values), axis=-1)
    cut = ordered.shape[-1] // 4
    return ordered[..., cut : ordered.shape[-1] - cut].mean(axis=-1)


def bootstrap_interval(
    values: Sequence[float], statistic: Callable[[Any], Any], seed: int, draws: int = _DRAWS
) -> tuple[float, float]:
    """95% percentile bootstrap interval of a statistic of one condition's runs.

    Runs are drawn with replacement within their condition (stratified). With few runs the interval is too
    narrow (docs/statistics.md has the coverage), so no verdict depends on it.

    Args:
        values: [n], one per run.
        statistic: maps [draws, n] to [draws].
        seed: seed of the draws.
        draws: number of bootstrap samples.
    Returns:
        (low, high); NaN for fewer than two values.
    References: Agarwal et al., arXiv:2108.13264 (stratified bootstrap over runs).
    """
    data = _finite_array(values)
    if len(data) < 2:
        return math.nan, math.nan
    chosen = np.random.default_rng(seed).integers(len(data), size=(draws, len(data)))
    low, high = np.quantile(statistic(data[chosen]), [LEVEL / 2, 1 - LEVEL / 2])
    return float(low), float(high)


def stratified(
    strata: Sequence[Any],
    statistic: Callable[[list[Any]], Any],
    seed: int,
    draws: int = _DRAWS // 5,
    *,
    used: float = 1.0,
    pairwise: bool = False,
) -> tuple[Any, Any, Any]:
    """A statistic of the runs of several tasks, with its 95% bootstrap interval; runs are drawn within their task.

    A bootstrap of few runs has too little spread. The percentile interval is therefore widened around the value by the
    factor sqrt(n / (n - 1)) t(0.975; used (N - tasks)) / z(0.975), with N runs in total and n = N / tasks.
    docs/statistics.md has the coverage.

    Args:
        strata: for each task [n, ...], one row for each run or pair of runs.
        statistic: maps a list of [draws, n, ...] to [draws, ...].
        seed: seed of the draws.
        draws: number of bootstrap samples.
        used: share of the runs that determine the statistic: 1/2 for an interquartile mean.
        pairwise: the statistic compares every run with every other. The noise of single pairs then adds about as much
            spread as the square root would, so the root is left out.
    Returns:
        (value, low, high) of the statistic's shape; the interval is NaN if no task has two runs.
    References: Agarwal et al., arXiv:2108.13264 (stratified bootstrap).
    """
    from scipy.special import ndtri, stdtrit

    data = [_finite_array(stratum) for stratum in strata if len(stratum)]
    runs, free = sum(map(len, data)), sum(map(len, data)) - len(data)
    value = statistic([stratum[None] for stratum in data])[0] if data else math.nan
    if not free:
        return value, value * math.nan, value * math.nan
    rng = np.random.default_rng(seed)
    drawn = statistic([stratum[rng.integers(len(stratum), size=(draws, len(stratum)))] for stratum in data])
    low, high = np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2], axis=0)
    root = 1.0 if pairwise else math.sqrt(runs / free)
    wider = root * stdtrit(used * free, 1 - LEVEL / 2) / ndtri(1 - LEVEL / 2)
    return value, value - wider * (value - low), value + wider * (high - value)


def stratified_by_start(
    strata: Sequence[Any],
    starts: Sequence[Sequence[int]],
    statistic: Callable[[list[Any]], Any],
    seed: int,
    draws: int = _DRAWS // 5,
) -> tuple[Any, Any, Any]:
    """A statistic of the runs of several tasks, with its 95% bootstrap interval; whole warm starts are drawn.

    All runs of a drawn start enter, and every task has the same drawn starts. So the interval covers effects of the
    starts, both those that tasks share and those that they do not. The percentile interval is widened around the value
    by the factor sqrt(k / (k - 1)) t(0.975; k - 1) / z(0.975), with k starts. docs/statistics.md has the coverage.

    Args:
        strata: for each task [n, ...], one row for each run or pair of runs.
        starts: for each task the index of the warm start of each row.
        statistic: maps a list of [draws, n, ...] to [draws, ...]. It is called once for all draws with the same numbers
            of runs, and a task without a run of the drawn starts is left out.
        seed: seed of the draws.
        draws: number of bootstrap samples.
    Returns:
        (value, low, high) of the statistic's shape; the interval is NaN for fewer than two starts.
    References: Cameron et al., Bootstrap-Based Improvements for Inference with Clustered Errors (2008).
    """
    from scipy.special import ndtri, stdtrit

    kept = [(_finite_array(stratum), np.asarray(own)) for stratum, own in zip(strata, starts, strict=True) if len(own)]
    known = np.unique(np.concatenate([own for _, own in kept])) if kept else np.empty(0)
    value = statistic([stratum[None] for stratum, _ in kept])[0] if kept else math.nan
    if len(known) < 2:
        return value, value * math.nan, value * math.nan
    chosen = np.random.default_rng(seed).integers(len(known), size=(draws, len(known)))
    members = [[np.flatnonzero(own == start) for start in known] for _, own in kept]
    counts = np.array([[len(rows) for rows in task] for task in members])
    sizes, same = np.unique(counts[:, chosen].sum(axis=-1).T, axis=0, return_inverse=True)
    found = [
        statistic(_drawn([stratum for stratum, _ in kept], members, chosen[same.ravel() == index]))
        for index in range(len(sizes))
    ]
    low, high = np.quantile(np.concatenate(found), [LEVEL / 2, 1 - LEVEL / 2], axis=0)
    free = len(known) - 1
    wider = math.sqrt(len(known) / free) * stdtrit(free, 1 - LEVEL / 2) / ndtri(1 - LEVEL / 2)
    return value, value - wider * (value - low), value + wider * (high - value)


def _drawn(data: Sequence[Array], members: Sequence[Sequence[Any]], chosen: Any) -> list[Array]:
    """Return the rows of the drawn starts: for each task that has any [draws, n, ...].

    Args:
        data: for each task [n, ...].
        members: for each task the rows of each start.
        chosen: [draws, starts], the drawn starts, with the same number of rows of a task in every draw.
    """
    rows = [np.stack([np.concatenate([task[start] for start in draw]) for draw in chosen]) for task in members]
    return [stratum[index] for stratum, index in zip(data, rows, strict=True) if index.shape[-1]]


def wins(strata: Sequence[Any]) -> Any:
    """P(X > Y) + P(X = Y) / 2 over all pairs of runs of a task, averaged over tasks: [draws].

    Args:
        strata: for each task [draws, n, 2], the results X and Y of n seeds.
    """
    found = [
        (s[..., :, None, 0] > s[..., None, :, 1]) + 0.5 * (s[..., :, None, 0] == s[..., None, :, 1]) for s in strata
    ]
    return np.mean([one.mean(axis=(-1, -2)) for one in found], axis=0)


def mean_interval(values: Any) -> tuple[Any, Any]:
    """95% interval of a mean: mean -+ t(0.975; n-1) * s / sqrt(n), along the last axis.

    For differences paired by seed this is the interval of the paired t-test. NaN for fewer than two values.
    """
    from scipy.special import stdtrit

    data = _finite_array(values)
    count = data.shape[-1]
    mean = data.mean(axis=-1) if count else np.full(data.shape[:-1], math.nan)
    if count < 2:
        return mean * math.nan, mean * math.nan
    half = stdtrit(count - 1, 1 - LEVEL / 2) * data.std(axis=-1, ddof=1) / math.sqrt(count)
    return mean - half, mean + half


def sign_flip(differences: Any, seed: int = 0, scale: float = 0.0) -> Any:
    """Two-sided p-value of the sign-flip permutation test: the share of sign patterns with a mean as far from 0.

    p = #{s in {-1, 1}^n : |sum s_i d_i| >= |sum d_i|} / 2^n

    Exact up to EXACT_SEEDS differences; beyond, (1 + hits) / (1 + draws) over 100,000 random patterns, which is
    valid as well. Without any difference p is 1.

    Args:
        differences: [..., n], one per seed.
        seed: seed of the random patterns.
        scale: largest magnitude of the values that were subtracted. Their rounding is larger than that of a small
            difference: 10000.3 - 10000.1 and 0.2 differ by 1e-12.
    References: Fisher, The Design of Experiments (1935); Phipson & Smyth, arXiv:1603.05766 (the + 1).
    """
    data = _finite_array(differences)
    count = data.shape[-1]
    if count == 0:
        return np.full(data.shape[:-1], 1.0)
    exact = count <= EXACT_SEEDS
    if exact:  # half of the patterns suffice: flipping all signs does not change an absolute sum
        signs = 1.0 - 2.0 * ((np.arange(2 ** (count - 1))[:, None] >> np.arange(count)) & 1)
    else:
        signs = np.random.default_rng(seed).choice([-1.0, 1.0], size=(_PATTERNS, count))
    observed = np.abs(data.sum(axis=-1))
    # Equal sums differ by rounding: of the sum, and of every subtracted value.
    slack = 1e-12 * np.abs(data).sum(axis=-1) + _ROUNDING * scale * count
    hits = (np.abs(data @ signs.T) >= (observed - slack)[..., None]).sum(axis=-1)
    return hits / len(signs) if exact else (1 + hits) / (1 + len(signs))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction. It bounds the family-wise error rate, also for dependent tests.

    p~_(i) = max_{j <= i} min(1, (m - j + 1) p_(j)),  p sorted ascending

    Returns:
        Adjusted values in the given order; a value of at most LEVEL is significant.
    References: Holm, A Simple Sequentially Rejective Multiple Test Procedure (1979).
    """
    adjusted, floor = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(np.argsort(_finite_array(p_values), kind="stable").tolist()):
        floor = max(floor, min(1.0, (len(p_values) - rank) * float(p_values[index])))
        adjusted[index] = floor
    return adjusted


def improvement(values: Sequence[float], others: Sequence[float], seed: int) -> tuple[float, float, float]:
    """Probability of improvement: P(X > Y) + P(X = Y) / 2 for a run of one condition and a run of the other.

    Args:
        values: results X of the runs of one condition.
        others: results Y of the runs of the other condition.
        seed: seed of the bootstrap.
    Returns:
        (value over all pairs of runs, low, high) in [0, 1]; 0.5 if neither condition is better. The 95% percentile
        bootstrap interval draws the runs of both conditions; it is NaN if a condition has fewer than two runs. The
        value is NaN if a condition has no run.
    References: Agarwal et al., arXiv:2108.13264; it is Mann & Whitney's U / (n m).
    """
    left, right = _finite_array(values)[:, None], _finite_array(others)[None]
    wins = (left > right) + 0.5 * (left == right)
    value = float(wins.mean()) if wins.size else math.nan
    if min(wins.shape) < 2:
        return value, math.nan, math.nan
    rng = np.random.default_rng(seed)
    rows = rng.integers(len(values), size=(_DRAWS // 5, len(values), 1))
    columns = rng.integers(len(others), size=(_DRAWS // 5, 1, len(others)))
    low, high = np.quantile(wins[rows, columns].mean(axis=(1, 2)), [LEVEL / 2, 1 - LEVEL / 2])
    return value, float(low), float(high)


def effect_size(differences: Sequence[float], scale: float = 0.0) -> float:
    """Paired effect size with Hedges' correction: g = (1 - 3 / (4 (n-1) - 1)) * mean(d) / sd(d).

    Args:
        differences: one per seed.
        scale: largest magnitude of the values that were subtracted; differences that are equal up to the rounding of
            these values count as equal.
    Returns:
        g; NaN for fewer than three differences; infinite, with the mean's sign, for equal differences other than 0.
    References: Hedges, Distribution Theory for Glass's Estimator (1981).
    """
    data = _finite_array(differences)
    if len(data) < 3:
        return math.nan
    mean, deviation = float(data.mean()), float(data.std(ddof=1))
    if deviation <= max(1e-12 * abs(mean), _ROUNDING * scale):
        return math.copysign(math.inf, mean) if abs(mean) > _ROUNDING * scale else 0.0
    return (1 - 3 / (4 * (len(data) - 1) - 1)) * mean / deviation


def deviation(differences: Sequence[float]) -> float:
    """Standard deviation of the paired differences, with n - 1; NaN for fewer than two."""
    data = _finite_array(differences)
    return float(data.std(ddof=1)) if len(data) > 1 else math.nan


def smallest_p(seeds: int) -> float:
    """Smallest p-value of a paired permutation test: 2 / 2^n, when all differences have the same sign."""
    return min(1.0, 2.0 ** (1 - seeds))


def power(seeds: int, effect: float, alpha: float = LEVEL) -> float:
    """Probability that `sign_flip` detects a difference of `effect` standard deviations of the paired difference.

    The differences are assumed to be normal. A result is significant if, on its side of 0, at most
    k = floor(alpha 2^n / 2) sign patterns are as extreme as the data:

    k = 0: the power is 0, as no outcome is significant.
    k = 1: Phi(effect)^n + Phi(-effect)^n, as all seeds must have the same sign.
    k < 100: the share of simulated tables that are significant.
    k >= 100, or n > EXACT_SEEDS: the power of the paired t-test, P(|T| > t(1 - alpha/2; n-1)) with T noncentral and
    delta = effect * sqrt(n), which the permutation test approaches.

    Args:
        seeds: number n of paired seeds.
        effect: true mean of the difference divided by its standard deviation.
        alpha: level of the test, in (0, 1).
    """
    if seeds < 2 or smallest_p(seeds) > alpha:
        return 0.0
    size = min(abs(effect), _CERTAIN)
    if seeds > EXACT_SEEDS or (extreme := int(alpha / smallest_p(seeds))) >= _SMOOTH:
        return _t_power(seeds, size, alpha)
    if extreme == 1:
        return sum((math.erfc(-side / math.sqrt(2)) / 2) ** seeds for side in (size, -size))  # Phi(side)^n
    shifts = _least_significant(seeds, extreme)
    return float(np.searchsorted(shifts, size) + np.searchsorted(shifts, -size)) / len(shifts)


def _t_power(seeds: int, effect: float, alpha: float) -> float:
    """Return the power of the two-sided paired t-test."""
    from scipy.special import nctdtr, stdtrit

    critical, shift = float(stdtrit(seeds - 1, 1 - alpha / 2)), effect * math.sqrt(seeds)
    below, above = float(nctdtr(seeds - 1, shift, -critical)), 1 - float(nctdtr(seeds - 1, shift, critical))
    return above + (0.0 if math.isnan(below) else below)


@cache
def _least_significant(seeds: int, extreme: int) -> Array:
    """Return for each simulated table of noise the shift above which it is significantly above 0: [tables], ascending.

    Consider a table of differences d with a sum above 0. Flipping the signs of a subset F gives a sum at least as far
    from 0 exactly if sum_F d <= 0, or if that holds for the complement of F. So the table d = z + e has
    p = 2 #{F : mean_F z <= -e} / 2^n, counting the empty F, and it is significant if e is larger than the k-th largest
    -mean_F z over the nonempty F. By symmetry, -e describes tables with a sum below 0.

    Args:
        seeds: number n of paired seeds.
        extreme: k, see `power`.
    """
    members = ((np.arange(1, 2**seeds)[:, None] >> np.arange(seeds)) & 1).astype(np.float64)
    members /= members.sum(axis=1, keepdims=True)
    tables = min(_TABLES, 2**25 >> seeds)
    noise = np.random.default_rng(0).normal(size=(tables, seeds))
    blocks = np.array_split(noise, math.ceil(tables * 2**seeds / _SUMS))
    found = [np.partition(block @ members.T, extreme - 1, axis=1)[:, extreme - 1] for block in blocks]
    return np.sort(-np.concatenate(found))


def detectable_effect(seeds: int, sd: float, alpha: float = LEVEL) -> float:
    """Smallest true difference that `seeds` seeds detect with probability POWER; infinite if none can be significant.

    Args:
        seeds: number of paired seeds.
        sd: standard deviation over seeds of the paired difference, in the unit of the result.
        alpha: level of the test; for a family of m comparisons LEVEL / m.
    """
    if seeds < 2 or smallest_p(seeds) > alpha:
        return math.inf
    low, high = 0.0, 1.0
    while power(seeds, high, alpha) < POWER:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if power(seeds, middle, alpha) < POWER else (low, middle)
    return sd * high


def seeds_needed(effect: float, alpha: float = LEVEL) -> int | None:
    """Smallest number of seeds that detect `effect` (mean / sd of the paired difference) with probability POWER.

    None for an effect of 0, or one so small that 100,000 seeds are too few.
    """
    found = bisect_left(range(_MOST_SEEDS + 1), POWER, lo=2, key=lambda seeds: power(seeds, effect, alpha))
    return found if found <= _MOST_SEEDS else None
