"""Estimators of held-out performance. Plain Python numbers; no tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k completions, drawn from n without replacement, is right.

    pass@k = 1 - C(n-c, k) / C(n, k)

    Args:
        n: completions sampled for the problem.
        c: how many of them are correct.
        k: completions drawn; at least 1.
    Returns:
        The unbiased estimate in [0, 1]; 0 when nothing was sampled.
    Raises:
        ValueError: k > n > 0, for which no unbiased estimate exists.
    References: Chen et al., Evaluating Large Language Models Trained on Code, arXiv:2107.03374.
    """
    if n == 0:
        return 0.0
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} completions per problem, there are {n}")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mean_interval(values: Sequence[float], z: float = 1.96) -> tuple[float, float, float]:
    """Mean of per-problem scores in [0, 1] with a 95% interval that treats problems as the sample.

    Wilson's interval with the effective sample size m = p(1-p)/var(mean): exactly Wilson's when
    every score is 0 or 1, narrower when each score averages several completions.

    Args:
        values: one score per problem, in [0, 1]; at least one.
        z: normal quantile; 1.96 for 95%.
    Returns:
        (mean, low, high), clipped to [0, 1].
    References: Wilson (1927); Miller, Adding Error Bars to Evals, arXiv:2411.00640 (problems as the unit).
    """
    count = len(values)
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / count / count
    # Identical scores say nothing about spread: fall back to one trial per problem.
    size = mean * (1 - mean) / variance if variance > 0 and 0 < mean < 1 else float(count)
    center = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(mean * (1 - mean) / size + z * z / (4 * size * size))
    return mean, max(0.0, center - half), min(1.0, center + half)
