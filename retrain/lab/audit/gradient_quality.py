"""How good a stochastic gradient is: where it points, how noisy it is, and what it is worth, from B batches.

Gradients of different batches are independent, so that their inner products have no noise in their mean:
    <E x, E y> = E <x_a, y_b> for a != b,   tr Cov x = E |x_b|^2 - |E x|^2
Every estimate comes as [..., 1 + B]: that of all batches, then those that leave out one of them, for the jackknife.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class Quality(NamedTuple):
    """Figures of a gradient x against a reference r, each [..., 1 + B].

    Attributes:
        bias: 1 - cos(E x, E r); NaN where an estimate of |E x|^2 or |E r|^2 is not above 0.
        noise: the signal-to-noise ratio |E x|^2 / tr Cov x; NaN, as `worth`, where tr Cov x seems not above 0.
        worth: squared length of one batch's gradient along E r, over that of everything else in it,
            <E x, E r>^2 / (E |x|^2 |E r|^2 - <E x, E r>^2); 0 where the inner product is negative. It is
            1 / (tan^2 + 1 / (SNR cos^2)), with the angle between E x and E r: the reciprocal of the squared error
            of the gradient at its best scale, squared bias plus variance. A gradient without bias has SNR, which
            grows with its batch, so worth over that of another without bias is a ratio of batches.
    """

    bias: Tensor
    noise: Tensor
    worth: Tensor


def inner(x: Float[Tensor, "*R B D"], y: Float[Tensor, "*R B D"]) -> Float[Tensor, "*R C"]:
    """<E x, E y> from pairs of different batches; C = 1 + B."""
    count = x.shape[-2]
    own, left, right = (x * y).sum(-1), x.sum(-2, keepdim=True), y.sum(-2, keepdim=True)
    whole = (left * right).sum(-1) - own.sum(-1, keepdim=True)
    without = whole - (x * right).sum(-1) - (left * y).sum(-1) + 2 * own
    return torch.cat([whole / (count * (count - 1)), without / ((count - 1) * (count - 2))], -1)


def mean(values: Float[Tensor, "*R B"]) -> Float[Tensor, "*R C"]:
    """Mean over the batches."""
    total = values.sum(-1, keepdim=True)
    return torch.cat([total / values.shape[-1], (total - values) / (values.shape[-1] - 1)], -1)


def quality(x: Float[Tensor, "*R B D"], r: Float[Tensor, "*R B D"], squares: Float[Tensor, "*R B"]) -> Quality:
    """Figures of the gradients x of B >= 3 batches.

    Args:
        r: gradients of the same batches whose expectation is the true one, up to its length.
        squares: estimates of |x_b|^2: (x * x).sum(-1), or the product of two halves where x itself is an estimate.
    """
    signal, along, true, length = inner(x, x), inner(x, r), inner(r, r), mean(squares)
    noise, aligned = length - signal, along.clamp(min=0).square()
    rest = length * true - aligned
    noise, rest = (one.where(one > 0, torch.nan) for one in (noise, rest))  # NaN: too few batches to see it
    return Quality(1 - along / (signal * true).sqrt(), signal / noise, aligned / rest)


def interval(estimates: Float[Tensor, "*R C"], quantile: float) -> Float[Tensor, "*R 3"]:
    """Value, low, high: value -+ quantile * se,  se^2 = (B - 1)/B * sum_b (t_b - mean t)^2 over leave-one-out t_b.

    Args:
        quantile: of Student's t with B - 1 degrees of freedom.
    References: Efron and Stein, The Jackknife Estimate of Variance (1981).
    """
    value, others = estimates[..., 0], estimates[..., 1:]
    error = ((others.shape[-1] - 1) * others.var(-1, unbiased=False)).sqrt() * quantile
    return torch.stack([value, value - error, value + error], -1)


def ratio_interval(estimates: Float[Tensor, "*R C"], quantile: float) -> Float[Tensor, "*R 3"]:
    """`interval` of a positive ratio, on the scale of its logarithm; on its own scale where an estimate is 0."""
    logs = interval(estimates.log(), quantile).exp()
    return logs.where(logs.isfinite().all(-1, keepdim=True), interval(estimates, quantile))


def moments(columns: Float[Tensor, "N M"]) -> Float[Tensor, "K K"]:
    """Sums of products of M columns and a column of ones in front of them, of one batch; K = 1 + M."""
    table = torch.cat([torch.ones_like(columns[:, :1]), columns], 1).double()
    return table.T @ table


def covariance(sums: Float[Tensor, "B K K"]) -> Float[Tensor, "C M M"]:
    """Covariances of the columns over the rows of all batches, and of all but each."""
    total = sums.sum(0, keepdim=True)
    every = torch.cat([total, total - sums])
    average = every / every[:, :1, :1]
    return average[:, 1:, 1:] - average[:, 1:, :1] * average[:, :1, 1:]
