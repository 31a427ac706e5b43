"""Batches of responses without prompts, which suffice for credit assignment."""

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
    """Make a batch of responses; `replace` can add other columns.

    Args:
        logprobs: log-probs of the sampled tokens, one list per response, whose length is the number of tokens.
        rewards, correct, groups: one per response.
        dtype: dtype of log-probs, rewards and advantages.
    """
    import torch

    sizes = torch.tensor([len(row) for row in logprobs])
    # At least one column, even if all responses are empty.
    mask = torch.arange(max(1, int(sizes.max()))) < sizes[:, None]
    values = padded(logprobs, mask, dtype)
    group_ids = torch.tensor(list(groups))
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
    """Return [N, T] with one list per response, padded with zeros to the shape of the batch's mask."""
    import torch

    values = torch.zeros(mask.shape, dtype=dtype)
    for row, numbers in enumerate(rows):
        values[row, : len(numbers)] = torch.tensor(numbers, dtype=dtype)
    return values
