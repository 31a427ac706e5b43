"""Rows of different lengths as one list of tokens without padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Packing:
    """Where the tokens of R right-padded rows stand in a list without padding, a repeated prompt only once.

    Attributes:
        kept: [R, S] bool: the n cells in the list; not padding, and not the prompt of an earlier row.
        position_ids: [1, n] place of each token in its row.
        gather: [R, S] index of a row's tokens in the list; 0 in padding, which causality hides.
        scatter: [n] index of each token among the R*S cells.
        mask: [R, S] bool: the rows' real tokens.
        ragged: whether these rows attend by `ragged_attention`.
    """

    kept: Tensor
    position_ids: Tensor
    gather: Tensor
    scatter: Tensor
    mask: Tensor
    ragged: bool = False

    @classmethod
    def of(cls, input_ids: Tensor, mask: Tensor, scored: Tensor, ragged: bool = False) -> Packing:
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
        return cls(kept, columns[kept][None], gather, kept.reshape(-1).nonzero()[:, 0], mask, ragged)

    @cached_property
    def bounds(self) -> tuple[Tensor, Tensor, Tensor]:
        """What all layers attend by: where each row's queries begin and end in the list, [R + 1] int32; the same of
        its keys in a list of all rows' tokens, [R + 1] int32; and the index of those tokens in the list, int64.
        """
        starts = [functional.pad(cells.sum(-1).cumsum(0), (1, 0)).int() for cells in (self.kept, self.mask)]
        return starts[0], starts[1], self.gather[self.mask]
