"""Policy losses with a smooth or sequence-wide bound instead of the hard clip of single tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retrain import functional as F
from retrain.registry import Finding, loss

if TYPE_CHECKING:
    from torch import Tensor

LossAndMetrics = tuple["Tensor", dict[str, "Tensor"]]
Temperature = Annotated[float, Field(gt=0)]
LogBound = Annotated[float, Field(gt=0)]


@loss("importance_sampling", vanishes=True)
def importance_sampling(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, response_mask: Tensor
) -> LossAndMetrics:
    """Policy gradient with an importance ratio and without a clip.

    -rho * A,  rho = exp(lp - old_lp), log-ratio clamped to +-20

    Args:
        logprobs, old_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
    Returns:
        [N, T], with policy/approx_kl (-log rho). At rho = 1 the derivative with respect to lp is -A.
    References: Cui et al., The Entropy Mechanism of RL for Reasoning LMs, arXiv:2505.22617 (the loss to which `kl_cov`
        is added). tinker-cookbook and SkyRL use the same name.
    """
    log_ratio = F.ratios.log_ratio(logprobs, old_logprobs, response_mask)
    value = -log_ratio.exp() * F.masked.keep(advantages, response_mask)
    return value, {"policy/approx_kl": -log_ratio.detach()}


@loss("sapo", vanishes=True, trust_region=True)
def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: Temperature = 1.0,
    tau_neg: Temperature = 1.05,
) -> LossAndMetrics:
    """Soft adaptive gate: the gradient decreases smoothly as the ratio departs from 1, without a clip.

    -(4 / tau) * sigmoid(tau * (rho - 1)) * A,  tau = tau_pos where A > 0, else tau_neg

    rho = exp(lp - old_lp), log-ratio clamped to +-20. The derivative with respect to lp is
    -A rho 4 s (1 - s), with s the sigmoid; it is -A at rho = 1. The value at rho = 1 is -2 A / tau,
    which is not comparable with that of `ppo_clip`.

    Args:
        logprobs, old_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
        tau_pos, tau_neg: steepness of the gate for positive and for other advantages.
    Returns:
        [N, T], with policy/gate (4 s (1 - s), 1 where the gate is open) and policy/approx_kl.
        The paper uses the reduction `sequence_mean`.
    References: Gao et al., Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    import torch

    advantages = F.masked.keep(advantages, response_mask)
    log_ratio = F.ratios.log_ratio(logprobs, old_logprobs, response_mask)
    # Full tensors, because `where` of two Python numbers is float32.
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1))
    openness = (4 * gate * (1 - gate)).detach()
    return -4 / tau * gate * advantages, {
        "policy/gate": openness,
        "policy/approx_kl": -log_ratio.detach(),
    }


_RATIO_BOUND = 0.28
"""Largest common bound of a ratio; bounds of a log-ratio are larger."""


def _check_log_bounds(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Warn of bounds that are probably taken from a loss that clips the ratio."""
    for key in ("eps_low", "eps_high"):
        if params[key] <= _RATIO_BOUND:
            problem = f"{params[key]:g} is a bound of the log-ratio here, but looks like a bound of the ratio"
            yield Finding((key,), problem, "set it to 0.4, as in the paper", fatal=False)


@loss("gmpo", vanishes=True, check=_check_log_bounds, trust_region=True)
def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    eps_low: LogBound = 0.4,
    eps_high: LogBound = 0.4,
) -> LossAndMetrics:
    """Policy gradient with the geometric mean of a sequence's clipped token ratios as weight.

    -A_t * s * exp(c_t - sg(c_t)),  s = sg(exp(mean_t c_t)),  d = lp - old_lp clamped to +-20,
    c_t = min(d_t, eps_high) where A_t > 0, max(d_t, -eps_low) where A_t < 0, 0 where A_t = 0

    sg = no gradient. The derivative with respect to lp_t is -A_t s, and 0 where the token is clipped.

    Args:
        logprobs, old_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
        eps_low, eps_high: bounds of the log-ratio, not of the ratio; values up to 0.28 are probably bounds of a ratio
            from another loss.
    Returns:
        [N, T], with policy/clip_fraction (clipped tokens) and policy/approx_kl (-d). The paper uses the reduction
        `sequence_mean` and one advantage per row; here advantages may differ between tokens.
    References: Zhao et al., Geometric-Mean Policy Optimization, arXiv:2507.20673.
    """
    advantages = F.masked.keep(advantages, response_mask)
    log_ratio = F.ratios.log_ratio(logprobs, old_logprobs, response_mask)
    bounded = log_ratio.clamp(max=eps_high).where(advantages > 0, log_ratio.clamp(min=-eps_low))
    bounded = bounded.where(advantages != 0, 0.0)
    weight = F.masked.row_mean(bounded.detach(), response_mask).exp()
    value = -advantages * weight * (bounded - bounded.detach()).exp()
    clipped = (bounded != log_ratio) & (advantages != 0)
    return value, {
        "policy/clip_fraction": clipped.to(value.dtype),
        "policy/approx_kl": -log_ratio.detach(),
    }
