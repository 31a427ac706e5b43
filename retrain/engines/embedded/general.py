"""Decoder of any transformers causal LM: the model's own forward with the cache `Slots` and its attention."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.initialization import no_init_weights

from retrain.engines.capability import check_weights
from retrain.engines.embedded.decoder import ATTENTION, Slots
from retrain.functional.weights import LazyWeights, LowRank


class GeneralDecoder:
    """Computes prefill and decode steps with the forward of a second instance of the model's class.

    The instance shares no tensor with the trainer's model, so its weights change only in `load`.
    """

    name = "general"
    kind: type[Slots] = Slots

    def __init__(self, model: Any, dtype: torch.dtype) -> None:
        self._model = own_instance(model, dtype)
        # Its name before transformers 5.24 goes in 5.40.
        self._cache = "cache" if "cache" in signature(self._model.forward).parameters else "past_key_values"
        self.slots: Slots

    def load(self, weights: Mapping[str, Tensor]) -> None:
        copy_weights(self._model, weights)

    def prefill(self, ids: Tensor, slots: Slots) -> Tensor:
        """Compute the next columns of each prompt [B, t] for all its rows.

        Returns:
            Logits [B, V] of the token after them.
        """
        self.slots, length = slots, ids.shape[1]
        # `attend` computes one new token per row, so a prefill needs another attention function.
        # transformers reads this field at every forward.
        self._model.config._attn_implementation = "sdpa"
        logits = self._last_logits(ids, position_ids=slots.places(length), attention_mask=slots.mask(length))
        slots.used, slots.prefilling = slots.used + length, False
        self._model.config._attn_implementation = ATTENTION
        return logits

    def step(self, tokens: Tensor) -> Tensor:
        """Append a token [R] to every row and return the logits [R, V] of the next token."""
        return self.slots.step(self._next, tokens)

    def _next(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self._last_logits(tokens[:, None], position_ids=positions[:, None], attention_mask=self.slots.visible())

    def _last_logits(self, ids: Tensor, **inputs: Any) -> Tensor:
        output = self._model(input_ids=ids, use_cache=True, logits_to_keep=1, **inputs, **{self._cache: self.slots})
        return output.logits[:, -1]


class HalfLinear(nn.Linear):
    """Linear layer that multiplies in the dtype of its weight (bfloat16) and returns float32.

    On a CPU bfloat16 speeds up only matrix products. All other operations are faster in float32.
    """

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input.to(self.weight.dtype), self.weight, self.bias).float()


def own_instance(model: Any, dtype: torch.dtype) -> Any:
    """Create an instance of the model's class for sampling, with uninitialised weights.

    On a CPU bfloat16 applies only to the linear layers without the head.
    """
    device = next(model.parameters()).device
    half = device.type == "cpu" and dtype is not torch.float32
    with no_init_weights(), torch.device(device):
        copied = type(model)._from_config(copy.deepcopy(model.config), dtype=torch.float32 if half else dtype)
    copied.tie_weights()
    copied.config.pad_token_id = None  # otherwise GPT-2's forward searches the ids for padding at every step
    copied.eval().requires_grad_(False)
    if half:
        for module in copied.modules():
            if type(module) is nn.Linear and module is not copied.get_output_embeddings():
                # In place, so that ties and names stay; a new module would be another parameter.
                module.__class__ = HalfLinear
                module.to(dtype)
    return copied


def unmerged_update(update: LowRank, device: torch.device) -> Any:
    """Return a forward hook that adds LoRA's update, computed in float32, to a layer's output."""
    up, down = update.up.to(device, copy=True), update.down.to(device, copy=True)

    def add(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        ids = not inputs[0].is_floating_point()  # the layer is an embedding
        low = functional.embedding(inputs[0], down.T) if ids else functional.linear(inputs[0].float(), down)
        return (output + functional.linear(low, up)).to(output.dtype)

    return add


@torch.no_grad()
def copy_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy a full state dict into a module.

    LoRA's update is merged into float32 weights. With a narrower dtype it stays unmerged.

    Raises:
        EngineError: names or shapes differ; nothing has been copied.
    """
    state = module.state_dict()
    # Before the first copy, so that a refusal leaves the old weights whole.
    check_weights({name: tuple(value.shape) for name, value in state.items()}, weights)
    # Otherwise the old adapter's update would be added, too.
    for hook in getattr(module, "unmerged_hooks", ()):
        hook.remove()
    hooks: list[Any] = []
    for name, value in state.items():
        if isinstance(weights, LazyWeights) and name in weights.updates and value.dtype != torch.float32:
            value.copy_(weights.frozen(name))
            layer = module.get_submodule(name.rpartition(".")[0])
            hooks.append(layer.register_forward_hook(unmerged_update(weights.updates[name], value.device)))
        else:
            value.copy_(weights[name])
    module.unmerged_hooks = tuple(hooks)  # pyright: ignore[reportArgumentType] - a plain attribute
