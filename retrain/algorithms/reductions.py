"""Reductions: the weight of every token in the loss.

The mask [N, T] of 0 and 1 is that of the whole batch and not of a micro-batch. The second names, with hyphens, are the
values of `loss_agg_mode` in verl and Trinity-RFT.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.registry import reduction

if TYPE_CHECKING:
    from torch import Tensor


@reduction("token_mean")
@reduction("token-mean", table="token_mean")
def token_mean(mask: Tensor) -> Tensor:
    """Equal weight for every token.

    w_it = 1 / (number of tokens of the batch)

    Args:
        mask: [N, T], 1 on tokens that count.
    Returns:
        [N, T], sums to 1; 0 without tokens.
    References: Yu et al., DAPO, arXiv:2503.14476.
    """
    return mask / mask.sum().clamp(min=1)


@reduction("sequence_mean")
@reduction("seq-mean-token-mean", table="sequence_mean")
def sequence_mean(mask: Tensor) -> Tensor:
    """Equal weight for every sequence, divided evenly among its tokens.

    w_it = 1 / (rows * tokens of row i), rows without tokens not counted

    Args:
        mask: [N, T], 1 on tokens that count.
    Returns:
        [N, T], sums to 1; 0 without tokens.
    References: Shao et al., DeepSeekMath, arXiv:2402.03300.
    """
    tokens = mask.sum(-1, keepdim=True)
    # The clamps give rows and batches without tokens the weight 0 instead of 0 / 0.
    return mask / tokens.clamp(min=1) / (tokens > 0).sum().clamp(min=1)


@reduction("sequence_sum")
@reduction("seq-mean-token-sum", table="sequence_sum")
def sequence_sum(mask: Tensor) -> Tensor:
    """Sum over the tokens of a sequence, mean over sequences.

    w_it = 1 / rows, rows without tokens not counted

    Args:
        mask: [N, T], 1 on tokens that count.
    Returns:
        [N, T], sums to the mean number of tokens per row; the weight of a sequence grows with its length.
    References: LUSPO, arXiv:2602.05261.
    """
    return mask / mask.any(-1).sum().clamp(min=1)


@reduction("dr_grpo")
@reduction("seq-mean-token-sum-norm", table="dr_grpo")
def dr_grpo(mask: Tensor, max_tokens: int) -> Tensor:
    """Sum over the tokens of a sequence divided by a constant, mean over sequences.

    w_it = 1 / (rows * max_tokens), rows without tokens not counted

    Args:
        mask: [N, T], 1 on tokens that count.
        max_tokens: limit of response tokens in sampling.
    Returns:
        [N, T]; a token's weight does not depend on any length.
    References: Liu et al., Dr. GRPO, arXiv:2503.20783.
    """
    rows = mask.any(-1).sum().clamp(min=1)
    return mask / (rows * max(max_tokens, 1))
