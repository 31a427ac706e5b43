"""Rows of a batch as one list of tokens without padding, and batches as micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Packing:
    """Where the tokens of R right-padded rows stand in a list without padding, a repeated prompt only once.

    Attributes:
        kept: [R, S] bool: the n cells in the list; not padding, and not the prompt of an earlier row.
        position_ids: [1, n] place of each token in its row.
        gather: [R, S] index of a row's tokens in the list; 0 in padding, which causality hides.
        scatter: [n] index of each token among the R*S cells.
    """

    kept: Tensor
    position_ids: Tensor
    gather: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, input_ids: Tensor, mask: Tensor, scored: Tensor) -> Packing:
        """The packing of rows [R, S]: `mask` marks real tokens, and a prompt ends where `scored` begins."""
        rows, width = mask.shape
        columns = torch.arange(width, device=mask.device).expand_as(mask)
        prompt = mask & (scored.cumsum(-1) == 0)
        alike = torch.unique(input_ids.where(prompt, -1), dim=0, return_inverse=True)[1]
        number = torch.arange(rows, device=mask.device)
        first = torch.full_like(number, rows).scatter_reduce(0, alike, number, "amin")[alike]
        kept = mask & ~(prompt & (first != number)[:, None])
        index = (kept.reshape(-1).cumsum(0) - 1).view_as(kept)
        gather = index[first].where(prompt, index).where(mask, 0)
        return cls(kept, columns[kept][None], gather, kept.reshape(-1).nonzero()[:, 0])


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
