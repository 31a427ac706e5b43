"""Policy losses that replace the hard clip of single tokens by a smooth or a sequence-wide bound."""

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
        [N, T], with policy/approx_kl (-log rho). At rho = 1 the derivative by lp is -A.
    References: Cui et al., The Entropy Mechanism of RL for Reasoning LMs, arXiv:2505.22617 (the
        loss that `kl_cov` is added to); the name is that of tinker-cookbook and SkyRL.
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
    """Soft adaptive gate: the gradient fades as the ratio leaves 1, instead of ending at a clip.

    -(4 / tau) * sigmoid(tau * (rho - 1)) * A,  tau = tau_pos where A > 0, else tau_neg

    rho = exp(lp - old_lp), log-ratio clamped to +-20. The derivative by lp is
    -A rho 4 s (1 - s) with s the sigmoid: -A at rho = 1. The value at rho = 1 is -2 A / tau and
    not comparable with that of `ppo_clip`.

    Args:
        logprobs, old_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
        tau_pos, tau_neg: how fast the gate closes for rewarded and for punished tokens.
    Returns:
        [N, T], with policy/gate (4 s (1 - s), 1 where the gate is open) and policy/approx_kl.
        The paper's objective is this with the reduction `sequence_mean`.
    References: Gao et al., Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    import torch

    advantages = F.masked.keep(advantages, response_mask)
    log_ratio = F.ratios.log_ratio(logprobs, old_logprobs, response_mask)
    # Full tensors, since `where` of two Python numbers is float32.
    tau = torch.full_like(advantages, tau_neg).masked_fill(advantages > 0, tau_pos)
    gate = torch.sigmoid(tau * (log_ratio.exp() - 1))
    openness = (4 * gate * (1 - gate)).detach()
    return -4 / tau * gate * advantages, {
        "policy/gate": openness,
        "policy/approx_kl": -log_ratio.detach(),
    }


_RATIO_BOUND = 0.28
"""Largest usual bound of a ratio; those of a log-ratio are larger."""


def _check_log_bounds(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Warn of bounds that were probably carried over from a loss that clips the ratio."""
    for key in ("eps_low", "eps_high"):
        if params[key] <= _RATIO_BOUND:
            problem = f"{params[key]:g} bounds the log-ratio, and looks like the bound of a ratio"
            yield Finding((key,), problem, "the paper has 0.4", fatal=False)


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
    """Geometric mean of the clipped token ratios of a sequence, as the weight of each token.

    -A_t * s * exp(c_t - sg(c_t)),  s = sg(exp(mean_t c_t)),  d = lp - old_lp clamped to +-20,
    c_t = min(d_t, eps_high) where A_t > 0, max(d_t, -eps_low) where A_t < 0, 0 where A_t = 0

    sg = no gradient. The derivative by lp_t is -A_t s, and 0 where the token is clipped.

    Args:
        logprobs, old_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
        eps_low, eps_high: bounds of the log-ratio, not of the ratio; values of at most 0.28 are
            probably a ratio's bound carried over from another loss.
    Returns:
        [N, T], with policy/clip_fraction and policy/approx_kl. Token transforms keep their effect.
        The paper's objective is this with the reduction `sequence_mean` and one advantage per row.
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
