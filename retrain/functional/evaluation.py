"""Estimators of held-out performance, on Python numbers instead of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k completions, drawn from n without replacement, is correct.

    pass@k = 1 - C(n-c, k) / C(n, k)

    Args:
        n: number of completions sampled for the problem.
        c: number of correct completions among them.
        k: number of completions drawn; at least 1.
    Returns:
        The unbiased estimate in [0, 1]; 0 if n is 0.
    Raises:
        ValueError: k > n > 0, for which no unbiased estimate exists.
    References: Chen et al., Evaluating Large Language Models Trained on Code, arXiv:2107.03374.
    """
    if n == 0:
        return 0.0
    if k > n:
        raise ValueError(f"pass@{k} needs at least {k} completions per problem, but there are {n}")
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
    # Equal scores have no variance to estimate from, so each problem counts as one trial. They are compared, because
    # rounding leaves ten scores of 0.1 a variance of 1e-34, which would be an interval of length 0.
    size = mean * (1 - mean) / variance if min(values) < max(values) else float(count)
    center = (mean + z * z / (2 * size)) / (1 + z * z / size)
    half = z / (1 + z * z / size) * math.sqrt(mean * (1 - mean) / size + z * z / (4 * size * size))
    return mean, max(0.0, center - half), min(1.0, center + half)


def change_interval(first: tuple[float, float, float], last: tuple[float, float, float]) -> tuple[float, float, float]:
    """Difference of two shares with its 95% interval, from their own intervals (Newcombe's hybrid score interval).

    d = p2 - p1;  low = d - sqrt((p2 - l2)^2 + (u1 - p1)^2),  high = d + sqrt((u2 - p2)^2 + (p1 - l1)^2)

    It treats the two shares as independent. For two evaluations of the same problems, which are positively correlated,
    it is wider than needed.

    Args:
        first, last: (share p, lower end l, upper end u), as `mean_interval` returns them.
    Returns:
        (d, low, high), in [-1, 1].
    References: Newcombe, Interval estimation for the difference between independent proportions (1998), method 10.
    """
    (p1, l1, u1), (p2, l2, u2) = first, last
    change = p2 - p1
    return change, change - math.hypot(p2 - l2, u1 - p1), change + math.hypot(u2 - p2, p1 - l1)


def ratio_interval(
    totals: Sequence[float], sizes: Sequence[int], z: float = 1.96
) -> tuple[float, float | None, float | None]:
    """Mean over all rollouts, sum(totals) / sum(sizes), with a 95% interval that treats problems as the sample.

    variance = P/(P-1) * sum_i (t_i - mean * n_i)^2 / (sum_i n_i)^2 over P problems

    Args:
        totals: for each problem, a sum over its rollouts, such as the number of tokens.
        sizes: for each problem, the number of its rollouts, at least 1.
        z: normal quantile; 1.96 for 95%.
    Returns:
        (mean, low, high) in the unit of the totals; low and high are None for a single problem.
    References: Miller, Adding Error Bars to Evals, arXiv:2411.00640 (clustered standard errors).
    """
    count, size = len(totals), sum(sizes)
    mean = sum(totals) / size
    # A single problem says nothing about the spread between problems.
    if count < 2:
        return mean, None, None
    spread = sum((total - mean * n) ** 2 for total, n in zip(totals, sizes, strict=True))
    half = z * math.sqrt(count / (count - 1) * spread) / size
    return mean, mean - half, mean + half


def paired_interval(differences: Sequence[float], z: float = 1.96) -> tuple[float, float | None, float | None]:
    """Mean difference between two systems on the same problems, with its 95% interval.

    mean +- z * sd / sqrt(P), where sd is the sample standard deviation over P problems

    Args:
        differences: one per problem, in any unit; at least one.
        z: normal quantile; 1.96 for 95%.
    Returns:
        (mean, low, high); low and high are None for a single problem. The interval has length 0 if all
        differences are equal.
    References: Miller, Adding Error Bars to Evals, arXiv:2411.00640 (paired differences).
    """
    return ratio_interval(differences, [1] * len(differences), z)


def aes(accuracy: float, base_accuracy: float, tokens: float, base_tokens: float) -> tuple[float, float, float]:
    """Accuracy-efficiency score against a baseline. Shorter is better, and a loss of accuracy weighs more than a gain.

    AES = (Lb - L)/Lb + 3*(p - pb)/pb if p >= pb, else (Lb - L)/Lb - 5*(pb - p)/pb

    Args:
        accuracy: p, accuracy in [0, 1].
        base_accuracy: pb, accuracy of the baseline in [0, 1].
        tokens: L, mean number of tokens per rollout.
        base_tokens: Lb, mean number of tokens per rollout of the baseline.
    Returns:
        (AES, its length term, its accuracy term), without unit; a term is 0 if the value of its baseline is 0.
    References: Luo et al., O1-Pruner, arXiv:2501.12570 (the score).
    """
    length = (base_tokens - tokens) / base_tokens if base_tokens else 0.0
    gain = (accuracy - base_accuracy) / base_accuracy if base_accuracy else 0.0
    weighted_gain = (3.0 if gain >= 0 else 5.0) * gain
    return length + weighted_gain, length, weighted_gain
