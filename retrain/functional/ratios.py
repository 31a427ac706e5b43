"""Probability ratios between two policies, without overflow and independent of the values at padding positions."""

from typing import Literal

from jaxtyping import Bool, Float
from torch import Tensor

from retrain.functional.masked import keep, row_mean

LIMIT = 20.0
"""Bound of log-ratios. exp(20) is finite in every dtype except float16, and far outside any trust region."""


def log_ratio(
    new: Float[Tensor, "N T"],
    old: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    level: Literal["token", "sequence", "geometric"] = "token",
) -> Float[Tensor, "N T"]:
    """Return log(p_new / p_old), clamped to +-20; exactly 0 with zero gradient outside the mask.

    The mask is applied before any non-linearity, because 0 * exp(inf) is NaN.

    Args:
        new: [N, T] log-probs of the tokens under the new policy.
        old: [N, T] log-probs of the same tokens under the old policy.
        mask: [N, T] positions to use.
        level: "token" gives the log-ratio of each token; "sequence" the sum over its row and "geometric" the mean
            over its row, repeated at every position.
    """
    difference = keep(new, mask) - keep(old, mask)
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    elif level == "geometric":
        difference = row_mean(difference, mask)
    return keep(difference.clamp(-LIMIT, LIMIT).expand(mask.shape), mask)
