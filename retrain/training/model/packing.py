"""Packing: rows of different lengths as one list of tokens without padding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Packing:
    """Index tables between R right-padded rows of width S and a list of their n tokens.

    A prompt that several rows share is in the list once. Example: rows [7 8 9 0] and [7 8 5 0], both with the prompt
    [7 8], become the list [7 8 9 5].

    Attributes:
        kept: [R, S] bool, True for the n cells in the list: not padding, and not a prompt that an earlier row has.
        position_ids: [1, n] int64, position of each token in its row.
        gather: [R, S] int64, index of each cell's token in the list; 0 for padding, which causal attention hides.
        scatter: [n] int64, index of each token among the R * S cells.
        mask: [R, S] bool, True for tokens that are not padding.
        bounds: three tables for `ragged_attention`, which computes attention if they are there. The first two are
            boundaries [R + 1] int32: of each row's queries in the list, and of each row's keys in a list of all rows'
            tokens with shared prompts repeated. The third is the index of each of those tokens in the list, int64.
    """

    kept: Tensor
    position_ids: Tensor
    gather: Tensor
    scatter: Tensor
    mask: Tensor
    bounds: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, input_ids: Tensor, mask: Tensor, scored: Tensor, ragged: bool = False) -> Packing:
        """Make the packing of R rows of width S.

        Args:
            input_ids: [R, S] int64.
            mask: [R, S] bool, True for tokens that are not padding.
            scored: [R, S] bool; a row's prompt is all tokens before its first True, or the whole row without one.
            ragged: make `bounds`.
        """
        rows, width = mask.shape
        columns = torch.arange(width, device=mask.device).expand_as(mask)
        prompt = mask & (scored.cumsum(-1) == 0)
        # -1 is no token id, so that a prompt and its continuation are different rows.
        alike = torch.unique(input_ids.where(prompt, -1), dim=0, return_inverse=True)[1]
        number = torch.arange(rows, device=mask.device)
        # The first row with the same prompt holds it for all.
        first = torch.full_like(number, rows).scatter_reduce(0, alike, number, "amin")[alike]
        kept = mask & ~(prompt & (first != number)[:, None])
        index = (kept.reshape(-1).cumsum(0) - 1).view_as(kept)
        gather = index[first].where(prompt, index).where(mask, 0)
        starts = [functional.pad(cells.sum(-1).cumsum(0), (1, 0)).int() for cells in (kept, mask) if ragged]
        bounds = (starts[0], starts[1], gather[mask]) if ragged else None
        return cls(kept, columns[kept][None], gather, kept.reshape(-1).nonzero()[:, 0], mask, bounds)
