"""Slots whose decode step is the same operations on the same memory for many steps: on a GPU, a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from retrain.engines.embedded.decoder import Slots

Compute = Callable[[Tensor, Tensor], Tensor]
"""(tokens [R], positions [R]) -> logits [R, V], by way of the slots."""

_COLUMNS = 256
"""A step attends over whole blocks of so many columns: more are wasted, fewer make more graphs."""


class StaticSlots(Slots):
    """Slots at fixed addresses, in which only the contents of tensors differ from one step to the next.

    A step writes the column that a tensor names, and attends over the first `reach` columns, those that are not
    filled being hidden. So all steps with one number of rows and one reach are alike. On a GPU the first of them
    runs operation by operation, the second is captured as a CUDA graph, and the others replay it: the processor
    then starts one graph a step, where it had hundreds of kernels to start. Graphs live as long as one call of the
    sampler, and only one at a time: both numbers change in one direction only.

    Attributes:
        failed: why a step could not be captured; empty if none was refused.
    """

    compact_below = 0.5  # fewer numbers of rows, fewer graphs
    failed = ""

    def __init__(self, pad: Tensor, counts: Tensor, width: int, leaves: bool = False) -> None:
        super().__init__(pad, counts, width, leaves)
        self._shape, self._graph = (0, 0), None
        self._column = torch.zeros(1, dtype=torch.long, device=pad.device)
        self._columns = torch.arange(width, device=pad.device)

    @property
    def reach(self) -> int:
        """Columns that the next step attends over."""
        return min(self.width, (self.used // _COLUMNS + 1) * _COLUMNS)

    def add_layer(self, key: Tensor, value: Tensor) -> None:
        """As in `Slots`, and filled with zeros: a column that is hidden must still be a number."""
        super().add_layer(key, value)
        self.keys[-1].zero_()
        self.values[-1].zero_()

    def append(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write one token's key and value [rows, kv_heads, head_dim]; return the columns within reach."""
        self.keys[layer].index_copy_(3, self._column, key[..., None])
        self.values[layer].index_copy_(2, self._column, value[:, :, None])
        return self.keys[layer][..., : self._shape[1]], self.values[layer][:, :, : self._shape[1]]

    def visible(self) -> Tensor:
        """Bias [rows, 1, 1, reach]: -inf on padding and behind the column that is written, else 0."""
        columns = self._columns[: self._shape[1]]
        hidden = (columns < self._pads[:, None]) | (columns > self._column)
        return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -torch.inf)[:, None, None]

    def step(self, compute: Compute, tokens: Tensor) -> Tensor:
        shape = len(tokens), self.reach
        fresh = shape != self._shape
        if fresh:
            self._shape, self._graph = shape, None
            self._tokens, self._pads = tokens.clone(), self.pad.clone()
        self._tokens.copy_(tokens)
        self._column.fill_(self.used)
        if not fresh and self._graph is None and tokens.is_cuda and not StaticSlots.failed:
            self._capture(compute)
        if self._graph is None:
            logits = self._compute(compute)
        else:
            self._graph.replay()
            logits = self._logits
        self.used += 1
        return logits

    def _compute(self, compute: Compute) -> Tensor:
        return compute(self._tokens, self._column - self._pads)

    def _capture(self, compute: Compute) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            # The trainer's thread may allocate meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._logits = self._compute(compute)
        except RuntimeError as error:
            StaticSlots.failed = str(error).partition("\n")[0]
            logging.getLogger(__name__).warning("decode steps run without CUDA graphs: %s", StaticSlots.failed)
        else:
            self._graph = graph
