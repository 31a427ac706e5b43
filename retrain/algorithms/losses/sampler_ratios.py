"""Policy losses with a trust region around the sampler's policy, which need no other correction for it."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from retrain import functional as F
from retrain.algorithms.losses.surrogates import ratio_metrics
from retrain.registry import loss

if TYPE_CHECKING:
    from torch import Tensor

WeightedLoss = tuple["Tensor", dict[str, "Tensor"]]
ProbabilityBound = Annotated[float, Field(gt=0, le=1)]


@loss("ipo", vanishes=True)
def ipo(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    eps: ProbabilityBound = 0.3,
) -> WeightedLoss:
    """Importance-weighted policy gradient on tokens whose probability is close to the sampler's.

    -1[|p - mu| <= eps] * rho * A,  p = exp(lp), mu = exp(sampler_lp), rho = p / mu

    The log-ratio is clamped to +-20. Tokens are dropped for either sign of A. This is a loss of prime-rl, not
    Identity Preference Optimization.

    Args:
        logprobs, sampler_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
        eps: largest difference of the two probabilities.
    Returns:
        [N, T], with policy/clip_fraction (dropped tokens) and policy/approx_kl (-log rho).
    References: prime-rl's `default_loss_fn`, September 2026; the bound by total variation is that
        of Qi et al., DPPO, arXiv:2602.04879.
    """
    advantages = F.masked.keep(advantages, response_mask)
    log_ratio = F.ratios.log_ratio(logprobs, sampler_logprobs, response_mask)
    distance = _probability(logprobs, response_mask) - _probability(sampler_logprobs, response_mask)
    # |p - mu| and not the ratio: a rare token may change its ratio much and the distribution little.
    far = (distance.abs() > eps) & response_mask
    return (-log_ratio.exp() * advantages).where(~far, 0.0), ratio_metrics(far, log_ratio)


@loss("dppo", vanishes=True)
def dppo(  # noqa: PLR0913 - four columns and four keys
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    divergence: Literal["tv", "kl"] = "tv",
    low: Annotated[float, Field(ge=0)] = 0.2,
    high: Annotated[float, Field(ge=0)] = 0.2,
    cap: Annotated[float, Field(gt=0)] | Literal["none"] = 20.0,
) -> WeightedLoss:
    """Trust region of a divergence between probabilities instead of their ratio.

    -sg(min(rho, cap)) * A * lp, 0 on dropped tokens.  Dropped: A > 0, p > mu, D > high; A < 0, p < mu, D > low
    tv: D = |p - mu|;  kl: D = mu (ln mu - ln p) + (1 - mu) ln((1 - mu + 1e-8) / (1 - p + 1e-8))

    p = exp(lp), mu = exp(sampler_lp), rho = p / mu with log-ratio clamped to +-20, sg = no gradient. D is the
    divergence of the distribution over two events: this token, any other token. So the ratio of a rare token may
    change more than with a clip, and that of a frequent token less.

    Args:
        logprobs, sampler_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
        divergence: "tv" is total variation, "kl" the binary KL, which needs bounds of about 0.05.
        low, high: largest divergence of tokens with negative and with positive advantage.
        cap: largest weight; "none" for no limit.
    Returns:
        [N, T], with policy/clip_fraction (dropped tokens) and policy/approx_kl (-log rho).
    References: Qi et al., Rethinking the Trust Region in LLM RL, arXiv:2602.04879.
    """
    advantages = F.masked.keep(advantages, response_mask)
    new, old = F.masked.keep(logprobs, response_mask), F.masked.keep(sampler_logprobs, response_mask)
    log_ratio = F.ratios.log_ratio(new.detach(), old, response_mask)
    p, mu = new.detach().exp(), old.exp()
    distance = (p - mu).abs()
    if divergence == "kl":
        # 1e-8, because a certain token has 1 - p = 0.
        distance = -mu * log_ratio + (1 - mu) * ((1 - mu + 1e-8) / (1 - p + 1e-8)).log()
    over = (advantages > 0) & (p > mu) & (distance > high)
    under = (advantages < 0) & (p < mu) & (distance > low)
    dropped = (over | under) & response_mask
    weight = log_ratio.exp()
    # TOML has no null, so the text stands for no limit.
    weight = weight if cap == "none" else weight.clamp(max=cap)
    return (-weight * advantages * new).where(~dropped, 0.0), ratio_metrics(dropped, log_ratio)


@loss("topr", vanishes=True)
def topr(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    level: Literal["token", "sequence", "geometric"] = "sequence",
) -> WeightedLoss:
    """Tapered importance weights: 1 for positive advantages, at most 1 for negative ones.

    -alpha * A * lp,  alpha = 1 where A > 0, else sg(min(rho, 1)),  rho = exp(lp - sampler_lp)

    The log-ratio of a sequence is the sum over its tokens, clamped to +-20. In a long row, rho is almost always near 0
    or above 1. sg = no gradient.

    Args:
        logprobs, sampler_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
        level: ratio of the "token", of its "sequence" (as in the paper), or the sequence's "geometric" mean.
    Returns:
        [N, T], with policy/clip_fraction (tokens whose weight is limited to 1) and policy/approx_kl (-log rho).
    References: Le Roux et al., Tapered Off-Policy REINFORCE, arXiv:2503.14286.
    """
    advantages = F.masked.keep(advantages, response_mask)
    kept = F.masked.keep(logprobs, response_mask)
    log_ratio = F.ratios.log_ratio(kept.detach(), sampler_logprobs, response_mask, level)
    # Positive examples are imitated whatever the ratio; only negative ones could push without bound.
    weight = log_ratio.exp().clamp(max=1).masked_fill(advantages > 0, 1.0)
    return -weight * advantages * kept, ratio_metrics((log_ratio > 0) & (advantages < 0), log_ratio)


_LARGEST_EXPONENT = 80.0
"""exp(80) is finite in float32 and bfloat16, also times an advantage."""


@loss("vespo", vanishes=True)
def vespo(  # noqa: PLR0913 - four columns and four keys
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    k_pos: Annotated[float, Field(ge=0)] = 2.0,
    lambda_pos: Annotated[float, Field(ge=0)] = 3.0,
    k_neg: Annotated[float, Field(ge=0)] = 3.0,
    lambda_neg: Annotated[float, Field(ge=0)] = 2.0,
) -> WeightedLoss:
    """Policy gradient with a smooth weight per sequence, which vanishes far from the sampler's policy.

    -sg(phi) * A * lp,  phi = exp(lambda + k log w - lambda w),  log w = clip(sum_t d_t, ln 1e-8, 20)

    d = lp - sampler_lp, sg = no gradient. k and lambda depend on the sign of A. phi is 1 at w = 1. For long rows w is
    far from 1, and phi is near 0. With lambda = 0 it grows with w, up to exp(80), which float32 holds.

    Args:
        logprobs, sampler_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
        k_pos, lambda_pos: k and lambda where A >= 0.
        k_neg, lambda_neg: k and lambda where A < 0.
    Returns:
        [N, T], with policy/weight (phi), policy/clip_fraction (tokens with phi < 0.01) and
        policy/approx_kl (-log w).
    References: Shen et al., VESPO, arXiv:2602.10693.
    """
    import torch

    advantages = F.masked.keep(advantages, response_mask)
    kept = F.masked.keep(logprobs, response_mask)
    log_weight = F.ratios.log_ratio(kept.detach(), sampler_logprobs, response_mask, "sequence").clamp(min=log(1e-8))
    negative = advantages < 0
    k = torch.full_like(log_weight, k_pos).masked_fill(negative, k_neg)
    rate = torch.full_like(log_weight, lambda_pos).masked_fill(negative, lambda_neg)
    exponent = (rate + k * log_weight - rate * log_weight.exp()).clamp(max=_LARGEST_EXPONENT)
    phi = F.masked.keep(exponent.exp(), response_mask)
    metrics = ratio_metrics((phi < 0.01) & response_mask, log_weight)
    return -phi * advantages * kept, metrics | {"policy/weight": phi}


def _probability(logprobs: Tensor, mask: Tensor) -> Tensor:
    return F.masked.keep(logprobs.detach(), mask).exp()
