"""Rows of a batch as one list of tokens without padding, and batches as micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the n real tokens of R right-padded rows stand.

    Attributes:
        position_ids: [1, n] place of each token in its row.
        gather: [R, S] index of a row's tokens in the list; 0 in padding, which causality hides.
        scatter: [n] index of each token among the R*S cells.
    """

    position_ids: Tensor
    gather: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, mask: Tensor) -> Packing:
        """The packing of rows whose real tokens are `mask` [R, S] (bool, right-padded)."""
        index = (mask.reshape(-1).cumsum(0) - 1).view_as(mask)
        columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        return cls(columns[mask][None], index.where(mask, 0), mask.reshape(-1).nonzero()[:, 0])


def micro_batches(lengths: Sequence[int], rows: Sequence[int], budget: int) -> list[Tensor]:
    """Rows in descending length, cut so that rows x longest row of a part stays within the budget.

    Args:
        lengths: tokens of every row of the batch.
        rows: the rows to distribute.
        budget: cells per part; a longer row stands alone.
    Returns:
        int64 row numbers per part; the longest part first, so that running out of memory happens at once.
    """
    parts: list[list[int]] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        if not parts or (len(parts[-1]) + 1) * lengths[parts[-1][0]] > budget:
            parts.append([])
        parts[-1].append(row)
    return [torch.tensor(part) for part in parts]
