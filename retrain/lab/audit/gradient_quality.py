"""Bias and noise of a stochastic gradient, estimated from the gradients of B batches.

Gradients of different batches are independent, so the mean of their inner products is not biased by noise:
    <E x, E y> = E <x_a, y_b> for a != b,   tr Cov x = E |x_b|^2 - |E x|^2
Every estimate is a tensor [..., 1 + B] for the jackknife: first the estimate from all batches, then those from all
batches but one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Quality(NamedTuple):
    """Figures of a gradient x with respect to a reference r, each [..., 1 + B].

    Attributes:
        bias: 1 - cos(E x, E r); NaN where the estimate of |E x|^2 or |E r|^2 is not positive.
        noise: signal-to-noise ratio SNR = |E x|^2 / tr Cov x; NaN where the estimate of tr Cov x is not positive.
        effective_snr: <E x, E r>^2 / (E |x|^2 |E r|^2 - <E x, E r>^2), the squared length of a batch's gradient along
            E r over that of the rest of it. It equals 1 / (tan^2 a + 1 / (SNR cos^2 a)), with a the angle between E x
            and E r: the reciprocal of the squared error, squared bias plus variance, at the best scale of x. It is 0
            where the inner product is negative, and NaN where the denominator is not positive. Without bias it is SNR,
            which is proportional to the batch size, so the ratio of two such figures is a ratio of batch sizes.
    """

    bias: Tensor
    noise: Tensor
    effective_snr: Tensor


def inner(x: Float[Tensor, "*R B D"], y: Float[Tensor, "*R B D"]) -> Float[Tensor, "*R C"]:
    """Estimate <E x, E y> from pairs of different batches.

    Args:
        x, y: gradients of B batches and D parameters.
    Returns:
        [..., C] with C = 1 + B.
    """
    count = x.shape[-2]
    same = (x * y).sum(-1)
    left = x.sum(-2, keepdim=True)
    right = y.sum(-2, keepdim=True)
    # Products of a batch with itself contain the noise of its gradient twice, so they are left out of the sum.
    whole = (left * right).sum(-1) - same.sum(-1, keepdim=True)
    # Both subtracted products contain that of batch b with itself, which `whole` does not contain.
    without = whole - (x * right).sum(-1) - (left * y).sum(-1) + 2 * same
    return torch.cat([whole / (count * (count - 1)), without / ((count - 1) * (count - 2))], -1)


def mean(values: Float[Tensor, "*R B"]) -> Float[Tensor, "*R C"]:
    """Mean over all batches, and over all batches but one; C = 1 + B."""
    total = values.sum(-1, keepdim=True)
    return torch.cat([total / values.shape[-1], (total - values) / (values.shape[-1] - 1)], -1)


def quality(x: Float[Tensor, "*R B D"], r: Float[Tensor, "*R B D"], squares: Float[Tensor, "*R B"]) -> Quality:
    """Estimate the figures of a gradient.

    Args:
        x: gradients of B >= 3 batches and D parameters.
        r: gradients of the same batches whose expectation has the direction of the true gradient.
        squares: estimates of |x_b|^2: (x * x).sum(-1), or the inner product of two independent halves of x.
    """
    signal, along, true, length = inner(x, x), inner(x, r), inner(r, r), mean(squares)
    noise, aligned = length - signal, along.clamp(min=0).square()
    rest = length * true - aligned
    # With few batches an estimate of a variance can be negative.
    noise, rest = (estimate.where(estimate > 0, torch.nan) for estimate in (noise, rest))
    return Quality(1 - along / (signal * true).sqrt(), signal / noise, aligned / rest)


def interval(estimates: Float[Tensor, "*R C"], quantile: float) -> Float[Tensor, "*R 3"]:
    """Jackknife interval of an estimate t.

    t -+ quantile * se,  se^2 = (B - 1)/B * sum_b (t_b - mean_b t_b)^2, with t_b the estimate without batch b

    Args:
        estimates: [..., 1 + B].
        quantile: quantile of Student's t with B - 1 degrees of freedom.
    Returns:
        [..., 3]: value, low, high.
    References: Efron and Stein, The Jackknife Estimate of Variance (1981).
    """
    value, others = estimates[..., 0], estimates[..., 1:]
    error = ((others.shape[-1] - 1) * others.var(-1, unbiased=False)).sqrt() * quantile
    return torch.stack([value, value - error, value + error], -1)


def log_interval(estimates: Float[Tensor, "*R C"], quantile: float) -> Float[Tensor, "*R 3"]:
    """Jackknife interval of a positive ratio, computed for its logarithm; without logarithm where an estimate is 0.

    Args:
        estimates, quantile: see `interval`.
    Returns:
        [..., 3]: value, low, high.
    """
    # A ratio is skewed, and its logarithm about symmetric; the interval cannot reach below 0.
    logs = interval(estimates.log(), quantile).exp()
    return logs.where(logs.isfinite().all(-1, keepdim=True), interval(estimates, quantile))


def moments(columns: Float[Tensor, "N M"]) -> Float[Tensor, "K K"]:
    """Sums over N rows of the products of each two columns, after a column of ones is put before them; K = 1 + M."""
    table = torch.cat([torch.ones_like(columns[:, :1]), columns], 1).double()
    return table.T @ table


def covariance(sums: Float[Tensor, "B K K"]) -> Float[Tensor, "C M M"]:
    """Covariances of the columns over the rows of all batches, and of all batches but one.

    Args:
        sums: `moments` of B batches; K = 1 + M.
    Returns:
        [1 + B, M, M].
    """
    # Sums of products add up over batches, so that leaving one out is a subtraction.
    total = sums.sum(0, keepdim=True)
    every = torch.cat([total, total - sums])
    average = every / every[:, :1, :1]
    return average[:, 1:, 1:] - average[:, 1:, :1] * average[:, :1, 1:]
