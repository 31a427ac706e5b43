"""Batches of one number type, written by hand or drawn at random."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from retrain.registry import find
from retrain.types import Batch


def pad(rows: Sequence[Sequence[float]], width: int, dtype: torch.dtype = torch.float64, fill: float = 0.0):
    """Ragged rows as a tensor; a batch of tests without prompts, so the response starts in column 0."""
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)


def make_batch(
    logprobs: Sequence[Sequence[float]],
    rewards: Sequence[float],
    group_ids: Sequence[int] | None = None,
    *,
    dtype: torch.dtype = torch.float64,
    width: int | None = None,
    fill: float = 0.0,
    **columns: Any,
) -> Batch:
    """A batch whose sampler log-probs are `logprobs`; `fill` is what padding holds."""
    width = width or max(map(len, logprobs))
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in logprobs])
    reward = torch.tensor(rewards, dtype=dtype)
    batch = Batch(
        input_ids=torch.zeros(mask.shape, dtype=torch.long),
        attention_mask=mask,
        response_mask=mask,
        sampler_logprobs=pad(logprobs, width, dtype, fill),
        rewards=reward,
        correct=reward > 0.5,
        lengths=mask.sum(-1),
        group_ids=torch.tensor(group_ids if group_ids is not None else [0] * len(logprobs)),
        is_expert=torch.zeros(len(logprobs), dtype=torch.bool),
        advantages=torch.zeros(mask.shape, dtype=dtype),
        max_tokens=width,
    )
    return batch.replace(**columns)


def call(kind: str, name: str, columns: dict[str, Any], **params: Any) -> Any:
    """A component by its public name on columns by theirs; without its metrics. A row is one turn unless they say."""
    bound = find(kind, name).bind(params)
    if "turn_ids" in bound.reads and "turn_ids" not in columns:
        shape = columns["response_mask"].shape if "response_mask" in columns else (len(columns["group_ids"]), 1)
        columns = {**columns, "turn_ids": torch.zeros(shape, dtype=torch.long)}
    result = bound(*(columns[column] for column in bound.reads))
    return result[0] if isinstance(result, tuple) else result


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
