"""Attention over rows of different lengths without padding, with torch's `varlen_attn` on GPUs."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

if TYPE_CHECKING:
    from retrain.training.model.packing import Packing

# torch 2.11 accepts fewer key heads without this option.
_OPTIONS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def has_ragged_attention(device: torch.device, dtype: torch.dtype) -> bool:
    """Return True if `varlen_attn` (FlashAttention) can run: a 16-bit dtype, and an NVIDIA GPU, Ampere or newer."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16) or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def ragged_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, scale: float | None) -> Tensor:
    """Compute causal attention within each row of a packed list, without padding.

    The keys of a row are all its tokens. Its queries are those of its tokens that are in the list: the last ones, if
    the list has its prompt in another row. The kernel aligns its causal mask at the end, so that the last query attends
    to the last key, as it must.

    Args:
        query: [1, heads, n, d].
        key, value: [1, kv_heads, n, d].
        packing: the rows.
        scale: factor of the scores; None: 1 / sqrt(d).
    Returns:
        [1, n, heads, d] in the query's dtype.
    """
    kind, width = query.device.type, packing.mask.shape[1]
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    assert packing.bounds is not None
    queries, keys, cells = packing.bounds
    flat = [x[0].transpose(0, 1).to(dtype) for x in (query, key, value)]
    key, value = (x.index_select(0, cells) for x in flat[1:])
    out = varlen_attn(flat[0], key, value, queries, keys, width, width, scale=scale, window_size=(-1, 0), **_OPTIONS)
    assert isinstance(out, Tensor)
    return out[None].to(query.dtype)
