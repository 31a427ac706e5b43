"""Weight of every token in the loss, from the whole batch's mask [N, T] of 0 and 1, never a micro-batch's.

The second names, with hyphens, are the values of verl's and Trinity-RFT's `loss_agg_mode`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.registry import reduction

if TYPE_CHECKING:
    from torch import Tensor


@reduction("token_mean")
@reduction("token-mean", table="token_mean")
def token_mean(mask: Tensor) -> Tensor:
    """1 / (all tokens of the batch): every token counts the same (DAPO, arXiv:2503.14476)."""
    return mask / mask.sum().clamp(min=1)


@reduction("sequence_mean")
@reduction("seq-mean-token-mean", table="sequence_mean")
def sequence_mean(mask: Tensor) -> Tensor:
    """1 / (rows * tokens of the row): every sequence counts the same; empty rows do not count (arXiv:2402.03300)."""
    tokens = mask.sum(-1, keepdim=True)
    return mask / tokens.clamp(min=1) / (tokens > 0).sum().clamp(min=1)


@reduction("sequence_sum")
@reduction("seq-mean-token-sum", table="sequence_sum")
def sequence_sum(mask: Tensor) -> Tensor:
    """1 / rows: a sequence counts as often as it has tokens; empty rows do not count (LUSPO, arXiv:2602.05261)."""
    return mask / mask.any(-1).sum().clamp(min=1)


@reduction("dr_grpo")
@reduction("seq-mean-token-sum-norm", table="dr_grpo")
def dr_grpo(mask: Tensor, max_tokens: int) -> Tensor:
    """1 / (rows * max_tokens): no dependence on any length; empty rows do not count (Dr. GRPO, arXiv:2503.20783)."""
    rows = mask.any(-1).sum().clamp(min=1)
    return mask / (rows * max(max_tokens, 1))
