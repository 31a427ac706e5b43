"""Masks of off-policy samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from retrain import functional as F
from retrain.registry import transform

if TYPE_CHECKING:
    from torch import Tensor


@transform("opsm", correction=True, drops_only=True)
def opsm(
    advantages: Tensor,
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    response_mask: Tensor,
    *,
    delta: Annotated[float, Field(ge=0)] = 0.5,
) -> Tensor:
    """Set negative advantages to 0 in sequences that have become unlikely under the policy.

    A_t = 0 where A_t < 0 and the row's mean of (sampler_lp - old_lp) > delta

    These tokens stay in the denominator of the reduction. Each row depends on itself only, so the
    update applies this transform as it applies `tis`; their order does not matter.

    Args:
        advantages, old_logprobs, sampler_logprobs: [N, T]; response_mask: [N, T] bool.
        delta: largest mean log-ratio, in nats per token.
    Returns:
        [N, T].
    References: DeepSeek-AI, DeepSeek-V3.2 (off-policy sequence mask), arXiv:2512.02556.
    """
    gap = F.masked.row_mean(F.masked.keep(sampler_logprobs, response_mask) - old_logprobs, response_mask)
    # Only negative ones: pushing an unlikely sequence further down destabilizes, pulling one up does not.
    return advantages.masked_fill((advantages < 0) & (gap > delta), 0.0)
