"""Entropy control with the covariance of log-prob and advantage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retrain import functional as F
from retrain.registry import Finding, loss, signal, transform

if TYPE_CHECKING:
    from torch import Tensor

Rate = Annotated[float, Field(ge=0, le=1)]
Bounded = Annotated[float, Field(ge=0)]


def _check_bounds(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    if params["low"] >= params["high"]:
        yield Finding(
            ("low",), f"no covariance is above {params['low']:g} and below {params['high']:g}", "set low < high"
        )


@transform("clip_cov", check=_check_bounds)
def clip_cov(  # noqa: PLR0913 - four columns and four keys
    advantages: Tensor,
    old_logprobs: Tensor,
    response_mask: Tensor,
    step: int,
    *,
    rate: Rate = 2e-4,
    low: Bounded = 1.0,
    high: Bounded = 5.0,
    select: Literal["random", "highest"] = "random",
) -> Tensor:
    """Set the advantage of some tokens to 0 that would lower the entropy most.

    A_t = 0 on max(1, floor(rate * n)) of the tokens with low < cov_t < high, or on all of them if they are fewer
    cov_t = (A_t - mean A) * (lp_t - mean lp), means over the n response tokens of the batch

    The bounds assume advantages of unit variance (`grpo_std`, `gdpo`, `lite_ppo` or `whiten`).
    The covariance is that of the policy before the update, so it does not depend on micro-batches.

    Args:
        advantages, old_logprobs: [N, T]; response_mask: [N, T] bool; step: training step, the seed of the choice.
        rate: share of the response tokens whose advantage becomes 0.
        low, high: bounds of the covariance, in the unit of the advantage times nats.
        select: choose among these tokens at "random", or those with the "highest" covariance.
    Returns:
        [N, T].
    References: Cui et al., The Entropy Mechanism of RL for Reasoning LMs, arXiv:2505.22617.
    """
    import torch

    cov = _covariance(advantages, old_logprobs, response_mask)
    candidates = ((cov > low) & (cov < high) & response_mask).flatten().nonzero().squeeze(-1)
    count = min(_count(rate, response_mask), len(candidates))
    if select == "random":
        # Drawn on the CPU: a resumed run on another device drops the same tokens.
        order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(step))
        chosen = candidates[order[:count].to(candidates.device)]
    else:
        chosen = candidates[cov.flatten()[candidates].argsort(descending=True)[:count]]
    return advantages.flatten().index_fill(0, chosen, 0.0).view_as(advantages)


@signal("high_covariance")
def high_covariance(advantages: Tensor, old_logprobs: Tensor, response_mask: Tensor, *, rate: Rate = 2e-4) -> Tensor:
    """Flag of the tokens with the highest covariance of log-prob and advantage, [N, T], 0 or 1.

    1 on the max(1, floor(rate * n)) tokens with the largest (A_t - mean A) * (lp_t - mean lp), if positive

    Means are over the n response tokens of the batch; the log-probs are those before the update.

    Args:
        advantages, old_logprobs: [N, T]; response_mask: [N, T] bool.
        rate: share of the response tokens that are marked.
    Returns:
        [N, T] float.
    References: Cui et al., The Entropy Mechanism of RL for Reasoning LMs, arXiv:2505.22617.
    """
    import torch

    cov = _covariance(advantages, old_logprobs, response_mask).flatten()
    count = min(_count(rate, response_mask), int(response_mask.sum()))
    marked = torch.zeros_like(cov)
    if count:
        # Padding has covariance 0 and would go before negative ones.
        inside = cov.masked_fill(~response_mask.flatten(), -torch.inf)
        chosen = inside.topk(count).indices
        # A token that does not lower the entropy is not penalized, even if it is among the highest.
        marked[chosen] = (inside[chosen] > 0).to(cov.dtype)
    return marked.view_as(advantages)


@loss("kl_cov")
def kl_cov(logprobs: Tensor, old_logprobs: Tensor, high_covariance: Tensor, response_mask: Tensor) -> Tensor:
    """Penalty on the change of the few tokens that would lower the entropy most.

    |lp - old_lp| on the tokens that `high_covariance` flags, 0 elsewhere, log-ratio clamped to +-20

    The coefficient is the term's weight. The gradient is 0 at lp = old_lp, so the term has no effect in the first
    update of a batch. The paper's loss is this term and `importance_sampling`, which has no clip.

    Args:
        logprobs, old_logprobs: [N, T]; high_covariance: [N, T], 0 or 1; response_mask: [N, T] bool.
    Returns:
        [N, T] nats.
    References: Cui et al., The Entropy Mechanism of RL for Reasoning LMs, arXiv:2505.22617.
    """
    chosen = response_mask & (F.masked.keep(high_covariance, response_mask) != 0)
    return F.ratios.log_ratio(logprobs, old_logprobs, chosen).abs()


def _covariance(advantages: Tensor, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Product of the centred columns [N, T]; exactly 0 outside the mask, and everywhere if a column is constant."""
    return F.masked.keep(_centred(advantages, mask) * _centred(logprobs, mask), mask)


def _centred(column: Tensor, mask: Tensor) -> Tensor:
    """Subtract the lowest value before the mean, so that equal values give exactly 0."""
    import torch

    if not mask.any():
        return torch.zeros_like(column)
    above = F.masked.keep(column - column.masked_fill(~mask, torch.inf).amin(), mask)
    return above - F.masked.masked_mean(above, mask)


def _count(rate: float, mask: Tensor) -> int:
    # 1e-9 prevents that rounding makes a product such as 0.3 * 50 fall just below an integer.
    return max(1, int(rate * int(mask.sum()) + 1e-9))
