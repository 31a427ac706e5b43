"""Policy losses with a smooth or sequence-wide bound instead of the hard clip of single tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from retrain import functional as F
from retrain.algorithms.losses.surrogates import clipped
from retrain.registry import loss

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


@loss("gspo", vanishes=True)
def gspo(  # noqa: PLR0913 - four columns and three keys
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    eps_low: Annotated[float, Field(ge=0, le=1)] = 3e-4,
    eps_high: Annotated[float, Field(ge=0)] = 4e-4,
    ratio_mean: Literal["geometric", "arithmetic"] = "geometric",
) -> LossAndMetrics:
    """Clipped surrogate objective with one ratio per sequence and an advantage per token (GSPO-token).

    -min(s_t * A_t, clip(s_t, 1 - eps_low, 1 + eps_high) * A_t),  s_t = sg(s) * p_t / sg(p_t),
    s = exp(mean_t (lp_t - old_lp_t)), mean clamped to +-20, sg = no gradient
    arithmetic: s_t = sg(mean_t rho_t) + rho_t - sg(rho_t),  rho_t = exp(lp_t - old_lp_t), log-ratio clamped to +-20

    s_t has the value of s at every token. Inside the bounds, the derivative of the loss with respect to lp_t is
    -s * A_t, so an advantage per token has an effect. If all tokens of a sequence have the same advantage, the
    gradient equals that of sequence-level GSPO under every built-in reduction. Each token is clipped on its own,
    depending on the sign of A_t.

    Args:
        logprobs, old_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
        eps_low, eps_high: bounds of the ratio; they are small because s is a geometric mean.
        ratio_mean: mean of a row's token ratios. With "arithmetic" (GRPO-S, arXiv:2508.04349) the derivative of the
            loss with respect to lp_t inside the bounds is -rho_t * A_t.
    Returns:
        [N, T], with the metrics policy/clip_fraction (share of tokens whose gradient the bounds remove) and
        policy/approx_kl (-log s). The paper uses the reduction `sequence_mean`.
    References: Zheng et al., GSPO, arXiv:2507.18071, section 4.3.
    """
    kept = F.masked.keep(logprobs, response_mask)
    # The inner brackets are exactly 0 and have the gradient. Without them, rounding would change the ratio.
    if ratio_mean == "arithmetic":
        ratio = F.ratios.log_ratio(kept, old_logprobs, response_mask).exp()
        mean = F.masked.row_mean(ratio.detach(), response_mask).clamp(min=1e-9)  # an empty row has no logarithm
        log_ratio = (mean + (ratio - ratio.detach())).log()
    else:
        sequence = F.masked.row_mean(kept.detach() - old_logprobs, response_mask)
        log_ratio = (sequence + (kept - kept.detach())).clamp(-F.ratios.LIMIT, F.ratios.LIMIT)
    # The sequence's ratio was repeated at padding, too.
    log_ratio = F.masked.keep(log_ratio, response_mask)
    return clipped(log_ratio, F.masked.keep(advantages, response_mask), (eps_low, eps_high))


@loss("sapo", vanishes=True)
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
    return -4 / tau * gate * advantages, {"policy/gate": openness, "policy/approx_kl": -log_ratio.detach()}


@loss("gmpo", vanishes=True)
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
    # A > 0 raises ratios and A < 0 lowers them, so each needs a bound on one side only.
    bounded = log_ratio.clamp(max=eps_high).where(advantages > 0, log_ratio.clamp(min=-eps_low))
    bounded = bounded.where(advantages != 0, 0.0)
    weight = F.masked.row_mean(bounded.detach(), response_mask).exp()
    # exp(c - sg(c)) is 1 and passes the gradient of c on.
    value = -advantages * weight * (bounded - bounded.detach()).exp()
    is_clipped = (bounded != log_ratio) & (advantages != 0)
    return value, {"policy/clip_fraction": is_clipped.to(value.dtype), "policy/approx_kl": -log_ratio.detach()}
