"""Keys and values of a group of completions in static slots, and attention over them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache

ATTENTION = "retrain_slots"
"""Name under which transformers finds `slot_attention`."""


class Slots(Cache):
    """Cache of `group` completions per prompt: prompts are computed once and their slots repeated.

    Keys lie transposed, [rows, kv_heads, head_dim, width], values [rows, kv_heads, width, head_dim], so that the
    attention of one new token is two plain matrix products. The first `used` columns are filled. A prompt shorter
    than the longest is padded on its left; `bias` hides the padding.

    Attributes:
        used: columns filled so far; the next token is written there.
        pad: [rows] int64, padding columns of each row.
        bias: [rows, 1, 1, width], -inf on padding and 0 elsewhere; None if no prompt is padded.
    """

    def __init__(self, pad: Tensor, group: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(layers=[])
        self.group, self.width = group, width
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.used = 0
        self.pad = pad.repeat_interleave(group)
        self.bias: Tensor | None = None
        if bool(pad.any()):
            hidden = torch.arange(width, device=pad.device) < self.pad[:, None]
            self.bias = torch.zeros(hidden.shape, dtype=dtype, device=pad.device).masked_fill_(hidden, -torch.inf)
            self.bias = self.bias[:, None, None]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Fill a layer from the prompts [B, kv_heads, P, head_dim], or append one token to every row."""
        if not self.used:
            self._fill(key_states, value_states)
            return key_states, value_states
        return self.append(key_states[:, :, 0], value_states[:, :, 0], layer_idx)

    def append(self, key: Tensor, value: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Write one token's key and value [rows, kv_heads, head_dim]; return all filled columns."""
        end = self.used + 1
        self.keys[layer][..., self.used] = key
        self.values[layer][:, :, self.used] = value
        return self.keys[layer][..., :end], self.values[layer][:, :, :end]

    def visible(self) -> Tensor | None:
        """Bias over the filled columns and the one about to be written."""
        return None if self.bias is None else self.bias[..., : self.used + 1]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows [n] (int64) only, as the first n; rows[i] >= i, so each moves down or stays."""
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        sources = rows[moved]
        for keys, values in zip(self.keys, self.values, strict=True):
            keys[moved, ..., : self.used] = keys[sources, ..., : self.used]
            values[moved, :, : self.used] = values[sources, :, : self.used]
        self.keys = [keys[: len(rows)] for keys in self.keys]
        self.values = [values[: len(rows)] for values in self.values]
        self.pad = self.pad[rows]
        self.bias = None if self.bias is None else self.bias[rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.used

    def get_query_offset(self, layer_idx: int | None = None) -> int:
        return self.used

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.used + query_length, 0

    def _fill(self, key: Tensor, value: Tensor) -> None:
        count, heads, length, size = key.shape
        rows = count * self.group
        keys = key.new_empty(rows, heads, size, self.width)
        values = value.new_empty(rows, heads, self.width, value.shape[-1])
        keys[..., :length] = key.transpose(-1, -2).repeat_interleave(self.group, 0)
        values[:, :, :length] = value.repeat_interleave(self.group, 0)
        self.keys.append(keys)
        self.values.append(values)


def attend(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of one new token per row over its slots; the query heads of a key head are its matrix rows.

    Args:
        query: [rows, heads, head_dim], scaled.
        keys, values: [rows, kv_heads, head_dim, t] and [rows, kv_heads, t, head_dim].
        bias: [rows, 1, 1, t] added to the scores, or None.
    Returns:
        [rows, heads, head_dim].
    """
    rows, heads, size = query.shape
    scores = torch.matmul(query.view(rows, keys.shape[1], -1, size), keys)
    if bias is not None:
        scores = scores + bias
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights, values).view(rows, heads, -1)


def slot_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """transformers' attention function for one new token per row, over keys and values as `Slots` holds them."""
    scaling = options.get("scaling")
    scaled = query[:, :, 0] * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    return attend(scaled, key, value, attention_mask)[:, None], None


AttentionInterface.register(ATTENTION, slot_attention)
