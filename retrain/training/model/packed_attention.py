"""Attention over a packed list of tokens, registered with transformers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface

from retrain.training.model.packing import Packing

NAME = "retrain_packed"

_KNOWN_OPTIONS = frozenset({"packing", "position_ids", "scaling", "sliding_window", "use_cache"})
"""Options that `packed_attention` computes, and those that do not change a forward pass without a cache.

`longest_packed_row` keeps rows within the sliding window.
"""


def packed_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Compute causal attention within each row of a packed list, as transformers' AttentionInterface.

    One gather pads the tokens to rows, and one scatter packs the result. Padding follows a row's
    tokens, so causality hides it.

    Args:
        query: [1, heads, n, d].
        key, value: [1, kv_heads, n, d].
        attention_mask: None; a model with a mask of its own cannot be packed.
        options: `packing`, which the model passes through, and the model's own `scaling`.
    Returns:
        [1, n, heads, d], and None for attention weights.
    Raises:
        ValueError: the model passes a mask, or an option that changes attention: a cap of the scores, sinks, a bias.
    """
    # transformers' own SDPA function ignores options it does not know, such as Gemma 2's cap.
    other = [name for name, value in options.items() if name not in _KNOWN_OPTIONS and _changes(value)]
    if other or attention_mask is not None:
        raise ValueError(f"packed attention does not compute {', '.join(other) or 'a mask'}")
    packing: Packing = options["packing"]
    scale: float | None = options.get("scaling")
    if packing.bounds is not None:
        from retrain.training.model.ragged import ragged_attention

        return ragged_attention(query, key, value, packing, scale), None
    rows, width = packing.gather.shape
    cells = packing.gather.reshape(-1)

    wide = query.device.type == "cpu"  # CPU attention is faster in float32, unlike matrix products
    grouped = query.shape[1] != key.shape[1]
    # With fewer key heads, torch's only GPU kernels are those that store all scores at once.
    if grouped and not wide:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))

    def padded(x: Tensor) -> Tensor:
        x = x.float() if wide else x
        return x[0].transpose(0, 1).index_select(0, cells).view(rows, width, x.shape[1], x.shape[3]).transpose(1, 2)

    with torch.autocast("cpu", enabled=False) if wide else nullcontext():
        out = functional.scaled_dot_product_attention(
            padded(query), padded(key), padded(value), is_causal=True, scale=scale, enable_gqa=grouped and wide
        )
    return out.transpose(1, 2).flatten(0, 1).index_select(0, packing.scatter)[None].to(query.dtype), None


AttentionInterface.register(NAME, packed_attention)


def _changes(option: Any) -> bool:
    """Return True if an option is set; dropout is 0 in eval mode, and flags of extra outputs are False."""
    return isinstance(option, Tensor) or bool(option)


@contextmanager
def packed(model: Any) -> Generator[None]:
    """Use the packed attention inside this block, for both forward and backward pass."""
    config = model.config.get_text_config()
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


def longest_packed_row(config: Any) -> float:
    """Return the length up to which a row attends to all earlier tokens: the window, or inf."""
    kinds = set(getattr(config, "layer_types", None) or ())
    # A config without kinds may still slide; only `use_sliding_window = false` says that it does not.
    local = bool(kinds - {"full_attention"}) or (not kinds and getattr(config, "use_sliding_window", True))
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return min([float(window) for window in windows if window and local], default=float("inf"))
