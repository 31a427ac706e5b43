"""Probability ratios between two policies, safe against overflow and against whatever padding holds."""

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from retrain.functional.masked import keep, row_mean

LIMIT = 20.0
"""exp(20) is finite in every dtype but float16, and far outside any trust region."""


def log_ratio(
    new: Float[Tensor, "N T"],
    old: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    level: Literal["token", "sequence", "geometric"] = "token",
) -> Float[Tensor, "N T"]:
    """log(p_new / p_old) clamped to +-20; exactly 0 with zero gradient outside the mask.

    The mask comes before any non-linearity: 0 * exp(inf) is NaN.

    Args:
        new, old: log-probs of the same tokens under two policies.
        mask: which positions count.
        level: of each token; of its whole sequence (the sum, at every position); or the sequence's mean.
    """
    difference = keep(new, mask) - keep(old, mask)
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    elif level == "geometric":
        difference = row_mean(difference, mask)
    return keep(difference.clamp(-LIMIT, LIMIT).expand(mask.shape), mask)
