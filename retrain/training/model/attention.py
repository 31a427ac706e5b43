"""Attention over packed tokens, plugged into transformers' models by name."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from retrain.training.model.packing import Packing

NAME = "retrain_packed"


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row of a packed list; transformers' attention interface.

    `options` holds `packing`, which the model passed through, and the model's own `scaling`.

    query is [1, heads, n, d], key and value are [1, kv_heads, n, d]: one gather pads them to rows, one
    scatter takes the result back to [1, n, heads, d]. Padding stands after a row's tokens, so causality hides it.
    """
    packing: Packing = options["packing"]
    rows, width = packing.gather.shape
    cells = packing.gather.reshape(-1)

    wide = query.device.type == "cpu"  # a processor multiplies matrices faster in bfloat16, but attends slower

    def padded(x: Tensor) -> Tensor:
        x = x.float() if wide else x
        return x[0].transpose(0, 1).index_select(0, cells).view(rows, width, x.shape[1], x.shape[3]).transpose(1, 2)

    grouped, scale = query.shape[1] != key.shape[1], options.get("scaling")
    with torch.autocast("cpu", enabled=False) if wide else nullcontext():
        out = F.scaled_dot_product_attention(
            padded(query), padded(key), padded(value), is_causal=True, scale=scale, enable_gqa=grouped
        )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, packing.scatter)[None], None


AttentionInterface.register(NAME, packed_attention)


@contextmanager
def packed(model: Any) -> Generator[None]:
    """The model attends over packed tokens inside this block; forward and backward both belong in it."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def longest_packed_row(config: Any) -> float:
    """Rows up to this length see every earlier token: the attention window, or inf without one."""
    kinds = set(getattr(config, "layer_types", None) or ())
    local = bool(kinds - {"full_attention"}) or (not kinds and getattr(config, "use_sliding_window", True))
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min([float(window) for window in windows if window and local], default=float("inf"))
