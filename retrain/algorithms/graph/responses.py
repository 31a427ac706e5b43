"""Batches of responses without prompts, which suffice for credit assignment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def with_turns(batch: Batch, turns: Sequence[Sequence[Mapping[str, Any]]]) -> Batch:
    """Return the batch with turns: only tokens inside turns count as sampled.

    Args:
        batch: batch of responses.
        turns: turns of each response, with `start`, `end` and perhaps `reward`; an empty list: one turn, the whole
            response.
    """
    ids = batch.turn_ids.clone()
    rewards = batch.turn_rewards.clone()
    mask = batch.response_mask.clone()
    for row, row_turns in enumerate(turns):
        if not row_turns:
            continue
        mask[row] = False
        rewards[row] = 0.0
        # The part of the reward that no turn received is the episode's final reward, which the last turn gets.
        rest = float(batch.rewards[row]) - sum(turn.get("reward", 0.0) for turn in row_turns)
        for number, turn in enumerate(row_turns):
            tokens = slice(turn["start"], turn["end"])
            mask[row, tokens] = True
            ids[row, tokens] = number
            rewards[row, turn["end"] - 1] = turn.get("reward", 0.0) + rest * (number == len(row_turns) - 1)
    return batch.replace(response_mask=mask, turn_ids=ids, turn_rewards=rewards, lengths=mask.sum(-1))


def padded(rows: Sequence[Sequence[Any]], mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [N, T] with one list per response, padded with zeros to the shape of the batch's mask."""
    import torch

    values = torch.zeros(mask.shape, dtype=dtype)
    for row, numbers in enumerate(rows):
        values[row, : len(numbers)] = torch.tensor(numbers, dtype=dtype)
    return values
