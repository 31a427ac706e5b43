"""Loss terms, which give one number per token. The objective applies their reduction and weight.

`logprobs` and `entropy` carry the gradient. Tokens outside the response give exactly 0 and a gradient of exactly 0,
also where a column is NaN or infinite.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from retrain import functional as F
from retrain.registry import loss

if TYPE_CHECKING:
    from torch import Tensor

_Terms = tuple["Tensor", dict[str, "Tensor"]]


@loss("reinforce", vanishes=True)
def reinforce(logprobs: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Policy gradient for on-policy data.

    -lp_t * A_t

    Args:
        logprobs, advantages: [N, T]; response_mask: [N, T] bool.
    Returns:
        [N, T] nats times the unit of the advantage.
    References: Ahmadian et al., Back to Basics, arXiv:2402.14740.
    """
    return -F.masked.keep(logprobs, response_mask) * F.masked.keep(advantages, response_mask)


@loss("ppo_clip", vanishes=True)
def ppo_clip(  # noqa: PLR0913 - four columns and three keys
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    eps_low: Annotated[float, Field(ge=0, le=1)] = 0.2,
    eps_high: Annotated[float, Field(ge=0)] = 0.28,
    dual_clip: Annotated[float, Field(gt=1)] | None = None,
) -> _Terms:
    """Clipped surrogate objective: no gradient that would move a ratio further out of the bounds.

    -min(rho * A, clip(rho, 1 - eps_low, 1 + eps_high) * A),  rho = exp(lp - old_lp), log-ratio clamped to +-20

    Args:
        logprobs, old_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
        eps_low, eps_high: bounds of the ratio; 0.2 and 0.28 are DAPO's, 0.2 on both sides is PPO's.
        dual_clip: the constant c, usually 3. Where A < 0, the loss is at most -c * A. None switches it off.
    Returns:
        [N, T], with the metrics policy/clip_fraction (share of tokens whose gradient the bounds remove) and
        policy/approx_kl (-log rho, an estimate of KL(old || new)). At rho = 1, the derivative with respect to
        lp is -A.
    References: Schulman et al., PPO, arXiv:1707.06347; Yu et al., DAPO, arXiv:2503.14476; Ye et al., dual clip,
        arXiv:1912.09729.
    """
    log_ratio = F.ratios.log_ratio(logprobs, old_logprobs, response_mask)
    return clipped(log_ratio, F.masked.keep(advantages, response_mask), (eps_low, eps_high), dual_clip)


@loss("cispo", vanishes=True)
def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    eps_max: Annotated[float, Field(gt=0)] = 5.0,
) -> _Terms:
    """Policy gradient with a truncated importance weight, which keeps the gradient of every token.

    -sg(min(rho, eps_max)) * A * lp,  rho = exp(lp - old_lp), log-ratio clamped to +-20, sg = no gradient

    Args:
        logprobs, old_logprobs, advantages: [N, T]; response_mask: [N, T] bool.
        eps_max: largest weight.
    Returns:
        [N, T], with the metrics policy/clip_fraction (share of tokens whose weight is truncated) and
        policy/approx_kl (-log rho).
    References: MiniMax, MiniMax-M1 (CISPO), arXiv:2506.13585.
    """
    # The ratio is a weight: a gradient through it would add a second policy gradient.
    log_ratio = F.ratios.log_ratio(logprobs, old_logprobs, response_mask).detach()
    ratio = log_ratio.exp()
    gradient = reinforce(logprobs, advantages, response_mask)
    return ratio.clamp(max=eps_max) * gradient, ratio_metrics(ratio > eps_max, log_ratio)


@loss("kl", weight=0.0)
def kl(
    logprobs: Tensor, ref_logprobs: Tensor, response_mask: Tensor, *, estimator: Literal["k1", "k2", "k3"] = "k3"
) -> Tensor:
    """Estimate of KL(policy || reference) at the sampled tokens.

    k1 = d,  k2 = d^2 / 2,  k3 = exp(-d) - 1 + d,  d = lp - ref_lp, clamped to +-20

    Args:
        logprobs, ref_logprobs: [N, T]; response_mask: [N, T] bool.
        estimator: "k1" is an unbiased value whose gradient has mean 0; "k2" has the gradient of the KL; "k3" is never
            negative.
    Returns:
        [N, T] nats. The default weight is 0, with which no reference model is loaded.
    References: Shao et al., DeepSeekMath, arXiv:2402.03300 (k3 as a loss).
    """
    d = F.ratios.log_ratio(logprobs, ref_logprobs, response_mask)
    if estimator == "k1":
        return d
    # d is clamped, so that exp(-d) of a token that the policy finds impossible stays finite.
    return d.square() / 2 if estimator == "k2" else (-d).exp() - 1 + d


@loss("entropy", weight=0.0)
def entropy(entropy: Tensor, response_mask: Tensor) -> Tensor:
    """Entropy bonus.

    -H_t,  H_t = -sum_v p_v log p_v of the policy at this position

    Args:
        entropy: [N, T] with gradient; response_mask: [N, T] bool.
    Returns:
        [N, T] nats, at most 0. The default weight is 0.
    References: Mnih et al., Asynchronous Methods for Deep RL, arXiv:1602.01783.
    """
    return -F.masked.keep(entropy, response_mask)


@loss("sft", source="expert")
def sft(logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Supervised loss on expert rows; rows of the policy do not contribute.

    -lp_t on expert rows

    Args:
        logprobs: [N, T]; response_mask: [N, T] bool, the tokens to imitate.
    Returns:
        [N, T] nats; the reduction counts tokens of expert rows only. If the objective also has losses on rows of the
        policy, [mix] mu is the share of this loss.
    References: Pan et al., Trinity-RFT (MIX), arXiv:2505.17826.
    """
    return -F.masked.keep(logprobs, response_mask)


@loss("sft_phi", source="expert")
def sft_phi(logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Supervised loss with little weight on tokens that the policy finds very likely or very unlikely.

    -phi_t * lp_t on expert rows,  phi_t = sg(p_t * (1 - p_t)), p_t = exp(lp_t), sg = no gradient

    Args:
        logprobs: [N, T]; response_mask: [N, T] bool, the tokens to imitate.
    Returns:
        [N, T] nats; phi is at most 1/4, so the term is weaker than `sft` at the same weight.
    References: Zhang et al., On-Policy RL Meets Off-Policy Experts (CHORD), arXiv:2508.11408.
    """
    kept = F.masked.keep(logprobs, response_mask)
    # Outside the mask p is 1, so phi is 0 there.
    p = kept.detach().exp()
    return -p * (1 - p) * kept


def clipped(log_ratio: Tensor, advantages: Tensor, eps: tuple[float, float], dual_clip: float | None = None) -> _Terms:
    """Clipped surrogate objective [N, T] of log-ratios and advantages [N, T], with its metrics; see `ppo_clip`."""
    ratio = log_ratio.exp()
    free = -ratio * advantages
    bound = -ratio.clamp(1 - eps[0], 1 + eps[1]) * advantages
    # The larger loss is the smaller objective, min(rho * A, clip(rho) * A).
    value = free.maximum(bound)
    if dual_clip is not None:
        # With A < 0 the loss grows with rho without a bound, and one stale token could dominate the batch.
        value = value.minimum(-dual_clip * advantages).where(advantages < 0, value)
    return value, ratio_metrics(bound > free, log_ratio)


def ratio_metrics(beyond: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    """Return policy/clip_fraction, where `beyond` [N, T] is True, and policy/approx_kl of log-ratios [N, T]."""
    return {"policy/clip_fraction": beyond.to(log_ratio.dtype), "policy/approx_kl": -log_ratio.detach()}
