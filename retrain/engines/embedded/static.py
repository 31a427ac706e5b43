"""Slots at fixed addresses, so that a GPU can replay the decode step as a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from retrain.engines.embedded.decoder import Slots

Compute = Callable[[Tensor, Tensor], Tensor]
"""(tokens [R], positions [R]) -> logits [R, V]; reads and writes the slots."""

_COLUMNS = 256
"""A step attends over a multiple of this many columns. Larger blocks waste work, smaller ones need more graphs."""


class StaticSlots(Slots):
    """Slots at fixed addresses: consecutive steps run the same operations on the same memory.

    A step writes the column whose index is in a tensor, and attends over the first `reach` columns,
    with unfilled ones masked. All steps with the same number of rows and the same reach are
    therefore identical. On a GPU the first of them runs kernel by kernel, the second is captured as
    a CUDA graph, and the others replay it: one launch per step instead of hundreds. Only one graph
    is kept at a time, because the number of rows only falls and the reach only grows.

    Attributes:
        failed: error of a failed capture, after which no further one is tried; empty before.
    """

    compact_below = 0.5  # every other number of rows needs another graph
    failed = ""

    def __init__(self, pad: Tensor, counts: Tensor, width: int, leaves: bool = False) -> None:
        super().__init__(pad, counts, width, leaves)
        self._shape, self._graph = (0, 0), None
        self._column = torch.zeros(1, dtype=torch.long, device=pad.device)
        self._columns = torch.arange(width, device=pad.device)

    @property
    def reach(self) -> int:
        """Number of columns that the next step attends over."""
        return min(self.width, (self.used // _COLUMNS + 1) * _COLUMNS)

    def add_layer(self, key: Tensor, value: Tensor) -> None:
        """Allocate a layer filled with zeros: masked columns are read and must not be NaN."""
        super().add_layer(key, value)
        self.keys[-1].zero_()
        self.values[-1].zero_()

    def append(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write one token's key and value [rows, kv_heads, head_dim]; return the columns within reach."""
        self.keys[layer].index_copy_(3, self._column, key[..., None])
        self.values[layer].index_copy_(2, self._column, value[:, :, None])
        return self.keys[layer][..., : self._shape[1]], self.values[layer][:, :, : self._shape[1]]

    def visible(self) -> Tensor:
        """Return the bias [rows, 1, 1, reach]: -inf on padding and after the current column, else 0."""
        columns = self._columns[: self._shape[1]]
        hidden = (columns < self._pads[:, None]) | (columns > self._column)
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None, None]

    def step(self, compute: Compute, tokens: Tensor) -> Tensor:
        shape = len(tokens), self.reach
        fresh = shape != self._shape
        if fresh:
            self._shape, self._graph = shape, None
            # Copies at fixed addresses, which the graph reads at every replay.
            self._tokens, self._pads = tokens.clone(), self.pad.clone()
        self._tokens.copy_(tokens)
        self._column.fill_(self.used)
        if not fresh and self._graph is None and tokens.is_cuda and not StaticSlots.failed:
            self._capture(compute)
        if self._graph is None:
            logits = self._compute(compute)
        else:
            self._graph.replay()
            # The tensor that the captured kernels write to.
            logits = self._logits
        self.used += 1
        return logits

    def _compute(self, compute: Compute) -> Tensor:
        return compute(self._tokens, self._column - self._pads)

    def _capture(self, compute: Compute) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # The trainer's thread may allocate GPU memory during the capture.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits = self._compute(compute)
        except RuntimeError as error:
            StaticSlots.failed = str(error).partition("\n")[0]
            logging.getLogger(__name__).warning("decode steps run without CUDA graphs: %s", StaticSlots.failed)
        else:
            self._graph = graph
