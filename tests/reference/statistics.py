"""The statistics of campaigns as they are printed: loops over plain numbers, and scipy.stats where it has them."""

from __future__ import annotations

import itertools
import math

from scipy import integrate, optimize, stats


def iqm(values):
    ordered = sorted(values)
    cut = len(ordered) // 4
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


def t_interval(values):
    n = len(values)
    mean = sum(values) / n
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    half = stats.t.ppf(0.975, n - 1) * deviation / math.sqrt(n)
    return mean - half, mean + half


def sign_flip(differences):
    hits = patterns = 0
    observed = abs(math.fsum(differences))
    for signs in itertools.product((-1, 1), repeat=len(differences)):
        patterns += 1
        hits += abs(math.fsum(s * d for s, d in zip(signs, differences, strict=True))) >= observed - 1e-12
    return hits / patterns


def holm(p_values):
    m = len(p_values)
    order = sorted(range(m), key=lambda i: p_values[i])
    adjusted = [0.0] * m
    for i in range(m):
        adjusted[order[i]] = max(min(1.0, (m - j) * p_values[order[j]]) for j in range(i + 1))
    return adjusted


def probability_of_improvement(left, right):
    return stats.mannwhitneyu(left, right).statistic / (len(left) * len(right))


def hedges(differences):
    n = len(differences)
    mean = sum(differences) / n
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    return (1 - 3 / (4 * (n - 1) - 1)) * mean / deviation


def noncentral_t_cdf(t, df, shift):
    """P(T <= t) = E Phi(t sqrt(V / df) - shift), V chi-squared with df degrees of freedom."""
    return integrate.quad(
        lambda v: stats.norm.cdf(t * math.sqrt(v / df) - shift) * stats.chi2.pdf(v, df),
        *(0, stats.chi2.isf(1e-16, df)),
        epsabs=1e-12,
        limit=400,
    )[0]


def t_power(n, effect, alpha):
    critical, shift = stats.t.ppf(1 - alpha / 2, n - 1), effect * math.sqrt(n)
    return 1 - noncentral_t_cdf(critical, n - 1, shift) + noncentral_t_cdf(-critical, n - 1, shift)


def all_alike_power(n, effect):
    """All n signs are the same."""
    return stats.norm.cdf(effect) ** n + stats.norm.cdf(-effect) ** n


def detectable_effect(power, sd):
    """The effect at which power(effect) is 0.8."""
    return sd * optimize.brentq(lambda effect: power(effect) - 0.8, 1e-6, 10, xtol=1e-12)
