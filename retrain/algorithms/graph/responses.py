"""A batch of responses whose prompts are not known: all that credit needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from retrain.types import Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def response_batch(
    logprobs: Sequence[Sequence[float]],
    rewards: Sequence[float],
    correct: Sequence[bool],
    groups: Sequence[int],
    dtype: torch.dtype,
) -> Batch:
    """Responses as a batch, for `replace` to fill in what else is known of them.

    Args:
        logprobs: of the sampled tokens, one list per response; they say how many tokens there are.
        rewards, correct, groups: one per response.
        dtype: of log-probs, rewards and advantages.
    """
    import torch

    sizes = torch.tensor([len(row) for row in logprobs])
    mask = torch.arange(max(1, int(sizes.max()))) < sizes[:, None]
    values, group_ids = padded(logprobs, mask, dtype), torch.tensor(list(groups))
    return Batch(
        input_ids=torch.zeros_like(mask, dtype=torch.long),
        attention_mask=mask,
        response_mask=mask,
        sampler_logprobs=values,
        rewards=torch.tensor(list(rewards), dtype=dtype),
        correct=torch.tensor(list(correct), dtype=torch.bool),
        lengths=sizes,
        group_ids=group_ids,
        is_expert=torch.zeros_like(group_ids, dtype=torch.bool),
        advantages=torch.zeros_like(values),
    )


def padded(rows: Sequence[Sequence[Any]], mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, T]: one list per response, and zeros behind it, in the shape of the batch's mask."""
    import torch

    values = torch.zeros(mask.shape, dtype=dtype)
    for row, given in enumerate(rows):
        values[row, : len(given)] = torch.tensor(given, dtype=dtype)
    return values
