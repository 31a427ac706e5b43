"""Decoding with any transformers causal LM: its own forward, our slots and our attention."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.initialization import no_init_weights

from retrain.engines.capability import check_weights
from retrain.engines.embedded.decoder import ATTENTION, Slots
from retrain.types import Adapted, LowRank


class GeneralDecoder:
    """Prefill and one-token steps through the forward of an own instance of the model's class.

    The instance shares nothing with the trainer's: its weights change with `load` and at no other time.
    """

    name = "general"
    kind: type[Slots] = Slots

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._model = own_instance(model, dtype)
        self.slots: Slots

    def load(self, weights: Mapping[str, Tensor]) -> None:
        copy_weights(self._model, weights)

    def prefill(self, ids: Tensor, slots: Slots) -> Tensor:
        """Compute the next columns of each prompt [B, t] for all its rows; logits [B, V] of the token after them."""
        self.slots, length = slots, ids.shape[1]
        # Read by transformers at every forward: `attend` takes one new token per row, and a prompt has many.
        self._model.config._attn_implementation = "sdpa"
        logits = self._forward(ids, position_ids=slots.places(length), attention_mask=slots.mask(length))
        slots.used, slots.prefilling = slots.used + length, False
        self._model.config._attn_implementation = ATTENTION
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token [R] to every row; logits [R, V] of the next."""
        return self.slots.step(self._next, tokens)

    def _next(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._forward(tokens[:, None], position_ids=positions[:, None], attention_mask=self.slots.visible())

    def _forward(self, ids: Tensor, **inputs: Any) -> Tensor:
        output = self._model(input_ids=ids, past_key_values=self.slots, use_cache=True, logits_to_keep=1, **inputs)
        return output.logits[:, -1]


class HalfLinear(nn.Linear):
    """A linear layer that multiplies in its weight's bfloat16 and returns float32.

    Matrix products are where bfloat16 pays on a CPU; everything around them is faster, and exact, in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input.to(self.weight.dtype), self.weight, self.bias).float()


def own_instance(model: Any, dtype: torch.dtype) -> Any:
    """A fresh instance of the model's class for sampling, weights not yet loaded.

    On a CPU bfloat16 applies to the linear layers, except the head that yields the logits.
    """
    device = next(model.parameters()).device
    half = device.type == "cpu" and dtype is not torch.float32
    with no_init_weights(), torch.device(device):
        own = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32 if half else dtype)
    own.tie_weights()
    own.config.pad_token_id = None  # else GPT-2's forward searches the ids for padding at every step
    own.eval().requires_grad_(False)
    if half:
        for module in own.modules():
            if type(module) is nn.Linear and module is not own.get_output_embeddings():
                module.__class__ = HalfLinear
                module.to(dtype)
    return own


def added_beside(update: LowRank, device: torch.device) -> Any:
    """Forward hook: adds what LoRA's update of a layer's matrix computes, in float32, to the layer's output."""
    up, down = update.up.to(device, copy=True), update.down.to(device, copy=True)

    def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        ids = not inputs[0].is_floating_point()  # those that an embedding looks up
        low = functional.embedding(inputs[0], down.T) if ids else functional.linear(inputs[0].float(), down)
        return (output + functional.linear(low, up)).to(output.dtype)

    return add


@torch.no_grad()
def copy_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy a full state dict into a module; EngineError, with nothing copied, if names or shapes differ.

    What LoRA has adapted is merged where the module holds float32. Where it holds less, base and update stay apart.
    """
    own = module.state_dict()
    check_weights({name: tuple(value.shape) for name, value in own.items()}, weights)
    for hook in getattr(module, "beside", ()):
        hook.remove()
    hooks: list[Any] = []
    for name, value in own.items():
        if isinstance(weights, Adapted) and name in weights.updates and value.dtype != torch.float32:
            value.copy_(weights.base[name])
            layer = module.get_submodule(name.rpartition(".")[0])
            hooks.append(layer.register_forward_hook(added_beside(weights.updates[name], value.device)))
        else:
            value.copy_(weights[name])
    module.beside = tuple(hooks)  # pyright: ignore[reportArgumentType] - a plain attribute
