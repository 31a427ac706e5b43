"""Decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3), with its forward in plain torch operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from retrain.engines.capability import check_weights, full_shapes
from retrain.engines.embedded.decoder import Slots, attend
from retrain.functional.weights import LazyWeights, LowRank

Attention = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""(query [..., heads, head_dim], key, value [..., kv_heads, head_dim], layer) -> [..., heads, head_dim]."""


_SMALL = 1 << 20
"""Size of a head, in bytes of float32, up to which its product takes little time compared with the layers."""


@dataclass(frozen=True)
class Linear:
    """Linear layers with the same input, concatenated into one.

    Attributes:
        weight: [out, in].
        bias: [out], or None.
        update: LoRA's up [out, r] and down [r, in] in float32, unmerged because adding them to a
            bfloat16 weight would round them away; None without LoRA.
    """

    weight: Tensor
    bias: Tensor | None
    update: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, with q, k and v in one matrix and gate and up in another.

    Attributes:
        norms: gains before attention and before the feed-forward part, [hidden] each.
        head_gain: [heads + kv_heads, head_dim] gain of the norm of q and k; None in families without it.
        qkv, out, gate_up, down: the linear layers.
    """

    norms: tuple[Tensor, Tensor]
    head_gain: Tensor | None
    qkv: Linear
    out: Linear
    gate_up: Linear
    down: Linear


class FusedDecoder:
    """Computes the same results as `GeneralDecoder` with half as many operations.

    On a CPU only the layers' matrix products are in `dtype`. The residual stream, norms, rotary
    embedding and attention are float32. The head is float32 if it is small; a large one is in
    `dtype`, which takes a third of the time and rounds its logits as the trainer does.
    """

    name = "fused"
    kind: type[Slots] = Slots

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        config = model.config
        self._device = next(model.parameters()).device
        self._dtype = dtype
        self._wide = torch.float32 if self._device.type == "cpu" else dtype
        self._heads, self._key_heads = config.num_attention_heads, config.num_key_value_heads
        self._size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._depth: int = config.num_hidden_layers
        self._eps: float = config.rms_norm_eps
        # The model's own module knows all variants of scaled frequencies.
        self._rotary = copy.deepcopy(model.model.rotary_emb)
        self._shapes = full_shapes(model)
        self.slots: Slots

    @torch.inference_mode()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a full state dict. LoRA's update is merged into float32 weights, and stays unmerged otherwise."""
        check_weights(self._shapes, weights)
        embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        self._embedding, self._head = self._copy(embedding), self._copy(head)
        if self._head.nbytes > _SMALL:
            self._head = self._head.to(self._dtype)
        self._norm = self._copy(weights["model.norm.weight"])
        self._layers = [self._layer(weights, f"model.layers.{index}.") for index in range(self._depth)]

    def prefill(self, ids: Tensor, slots: Slots) -> Tensor:
        """Compute the next columns of each prompt [B, t] for all its rows.

        Returns:
            Logits [B, V] of the token after them.
        """
        self.slots, length = slots, ids.shape[1]
        self._cos, self._sin = self._rotation(slots.width)
        mask = slots.mask(length)

        def attention(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
            key, value = slots.update(key.transpose(1, 2), value.transpose(1, 2), layer)
            mixed = functional.scaled_dot_product_attention(
                query.transpose(1, 2), key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
            return mixed.transpose(1, 2)

        logits = self._forward(ids, slots.places(length), attention)
        slots.used, slots.prefilling = slots.used + length, False
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token [R] to every row and return the logits [R, V] of the next token."""
        return self.slots.step(self._next, tokens)

    def _next(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits after one new token per row, at the given positions."""
        slots, bias, scale = self.slots, self.slots.visible(), self._size**-0.5

        def attention(query: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
            return attend(query[:, 0] * scale, *slots.append(key[:, 0], value[:, 0], layer), bias)[:, None]

        return self._forward(tokens[:, None], positions[:, None], attention)

    def _forward(self, ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the logits [rows, V] after the last of the ids [rows, t]."""
        hidden = self._embedding[ids]
        cos, sin = self._cos[positions].unsqueeze(-2), self._sin[positions].unsqueeze(-2)
        for index, layer in enumerate(self._layers):
            query, key, value = self._project(self._normed(hidden, layer.norms[0]), layer, cos, sin)
            hidden = hidden + self._linear(attention(query, key, value, index).flatten(-2), layer.out)
            gate, up = self._linear(self._normed(hidden, layer.norms[1]), layer.gate_up).chunk(2, -1)
            hidden = hidden + self._linear(functional.silu(gate) * up, layer.down)
        # Only the last position predicts the next token, and logits of all would be the largest tensor.
        last = self._normed(hidden[:, -1], self._norm).to(self._head.dtype)
        return functional.linear(last, self._head).to(self._wide)

    def _project(self, hidden: Tensor, layer: Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the normed and rotated query and key, and the value, each [rows, t, heads, head_dim]."""
        heads = self._linear(hidden, layer.qkv).to(self._wide).unflatten(-1, (-1, self._size))
        query_key, value = heads.split((self._heads + self._key_heads, self._key_heads), -2)
        if layer.head_gain is not None:
            query_key = functional.rms_norm(query_key, (self._size,), None, self._eps) * layer.head_gain
        # Rotary embedding rotates each pair (x[i], x[i + size/2]): the roll swaps the halves, and
        # `sin` contains the sign.
        query_key = torch.addcmul(query_key * cos, query_key.roll(self._size // 2, -1), sin)
        query, key = query_key.split((self._heads, self._key_heads), -2)
        return query, key, value

    def _linear(self, inputs: Tensor, layer: Linear) -> Tensor:
        out = functional.linear(inputs.to(self._dtype), layer.weight, layer.bias)
        if layer.update is None:
            return out
        up, down = layer.update
        return (out + functional.linear(functional.linear(inputs.float(), down), up)).to(self._wide)

    def _normed(self, hidden: Tensor, gain: Tensor) -> Tensor:
        return functional.rms_norm(hidden, gain.shape, gain, self._eps)

    def _rotation(self, width: int) -> tuple[Tensor, Tensor]:
        """Return cosines and signed sines of positions 0 to width - 1, [width, head_dim] each."""
        positions = torch.arange(width, device=self._device)
        cos, sin = self._rotary(torch.zeros(1, dtype=self._wide, device=self._device), positions[None])
        sign = torch.ones_like(sin[0])
        sign[:, : self._size // 2] = -1
        return cos[0], sin[0] * sign

    def _layer(self, weights: Mapping[str, Tensor], prefix: str) -> Layer:
        gain: Tensor | None = None
        if f"{prefix}self_attn.q_norm.weight" in weights:
            query, key = (weights[f"{prefix}self_attn.{name}_norm.weight"] for name in "qk")
            # One gain per head, so that query and key are normed in one operation.
            gain = self._copy(torch.cat([query.expand(self._heads, -1), key.expand(self._key_heads, -1)]))
        gains = (weights[f"{prefix}{name}_layernorm.weight"] for name in ("input", "post_attention"))
        before, after = map(self._copy, gains)
        return Layer(
            norms=(before, after),
            head_gain=gain,
            qkv=self._merged(weights, *(f"{prefix}self_attn.{name}_proj" for name in "qkv")),
            out=self._merged(weights, f"{prefix}self_attn.o_proj"),
            gate_up=self._merged(weights, f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj"),
            down=self._merged(weights, f"{prefix}mlp.down_proj"),
        )

    def _merged(self, weights: Mapping[str, Tensor], *names: str) -> Linear:
        """Concatenate the linear layers of these names, which have the same input."""
        biases = [weights[f"{name}.bias"] for name in names if f"{name}.bias" in weights]
        bias = torch.cat(biases).to(self._device, self._dtype) if biases else None
        matrices = [f"{name}.weight" for name in names]
        unmerged = weights if isinstance(weights, LazyWeights) and self._dtype != torch.float32 else None
        parts = [unmerged.frozen(name) if unmerged is not None else weights[name] for name in matrices]
        update = self._low_rank(unmerged.updates, matrices, parts) if unmerged is not None else None
        return Linear(torch.cat(parts).to(self._device, self._dtype), bias, update)

    def _low_rank(
        self, adapters: Mapping[str, LowRank], names: list[str], parts: list[Tensor]
    ) -> tuple[Tensor, Tensor] | None:
        """Return LoRA's updates of concatenated matrices as one: downs stacked, ups block-diagonal."""
        if adapters.keys().isdisjoint(names):
            return None
        updates = [adapters.get(name) for name in names]
        # A matrix without an adapter takes its rows and no columns in the block diagonal.
        ups = [torch.zeros(len(w), 0) if low is None else low.up for low, w in zip(updates, parts, strict=True)]
        downs = [low.down for low in updates if low is not None]
        return torch.block_diag(*(up.to(self._device) for up in ups)), torch.cat(downs).to(self._device)

    def _copy(self, weight: Tensor) -> Tensor:
        return weight.detach().to(self._device, self._wide, copy=True)
