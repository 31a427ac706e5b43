"""The statistics of campaigns as they are printed: loops over plain numbers, and scipy.stats where it has them."""

import itertools
import math

from scipy import stats


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


def max_t(differences, floor=0.0):
    """Westfall and Young's step-down max-t of -log p over all sign vectors; differences [m][n], None if missing."""
    n = len(differences[0])

    def statistic(row, signs):
        flipped = [s * d for s, d in zip(signs, row, strict=True) if d is not None]
        size, mean = len(flipped), math.fsum(flipped) / len(flipped)
        spread = math.sqrt(math.fsum((one - mean) ** 2 for one in flipped) / (size - 1))
        least = max(floor, 1e-6 * math.sqrt(math.fsum(d * d for d in flipped) / size))
        return -stats.t.logsf(abs(mean) * math.sqrt(size) / max(spread, least), size - 1) - math.log(2)

    tables = [[statistic(row, signs) for row in differences] for signs in itertools.product((1, -1), repeat=n)]
    order = sorted(range(len(differences)), key=lambda j: -tables[0][j])
    p = [0.0] * len(differences)
    last = 0.0
    for rank, j in enumerate(order):
        least = tables[0][j] * (1 - 1e-9)
        share = sum(max(table[k] for k in order[rank:]) >= least for table in tables) / len(tables)
        last = max(last, float(share))
        p[j] = last
    return p


def holm(p_values):
    m = len(p_values)
    order = sorted(range(m), key=lambda i: p_values[i])
    adjusted = [0.0] * m
    for i in range(m):
        adjusted[order[i]] = max(min(1.0, (m - j) * p_values[order[j]]) for j in range(i + 1))
    return adjusted


def hedges(differences):
    n = len(differences)
    mean = sum(differences) / n
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    return (1 - 3 / (4 * (n - 1) - 1)) * mean / deviation


def t_power(n, effect, alpha):
    critical, shift = stats.t.ppf(1 - alpha / 2, n - 1), effect * math.sqrt(n)
    return stats.nct.sf(critical, n - 1, shift) + stats.nct.cdf(-critical, n - 1, shift)
