"""Frozen linear layers in 4 bits: bitsandbytes quantizes and dequantizes, torch multiplies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from retrain.errors import ComponentError
from retrain.functional.weights import LazyWeights
from retrain.system.extras import library
from retrain.training.model import lora
from retrain.training.model.loading import Loaded, fill, parameter_names

_BLOCK = 64
"""Number of weights that share a scale."""


def quantize(loaded: Loaded, device: torch.device) -> Loaded:
    """Replace every linear layer except the output head by `FourBits`, for LoRA, and freeze the model.

    If the model's values are read from a source, only one whole matrix is in memory at a time.

    Args:
        loaded: the model, possibly on the meta device with a source of its values.
        device: device of the quantized model.
    Returns:
        `loaded` with the quantized model on the device, and without a source.
    Raises:
        MissingExtraError: bitsandbytes is not installed.
        ComponentError: the model has no linear layers.
    """
    model: Any = loaded.model
    source, names, head = loaded.source, parameter_names(model), model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and module is not head]
    if not linear:
        raise ComponentError(f"[model] quantization: {loaded.name} has no linear layers", "remove quantization")
    for name in linear:
        if source is not None:
            fill(model.get_submodule(name), lambda p: source(names[id(p)]))
        model.set_submodule(name, FourBits(model.get_submodule(name), device))
    if source is not None:
        fill(model, lambda p: source(names[id(p)]))
    return replace(loaded, model=model.to(device).requires_grad_(False), source=None)


class FourBits(nn.Linear):
    """A linear layer with a frozen matrix in 4 bits (NF4), which is dequantized for every product.

    Each block of 64 weights has a float32 scale, the largest magnitude in the block. Each weight is one of 16 multiples
    of the scale. This takes 0.5625 bytes per weight. Quantizing the dequantized matrix gives the same bits again.

    Args:
        layer: the layer to replace.
        device: device of the 4-bit matrix.

    References: Dettmers et al., QLoRA, arXiv:2305.14314 (which also quantizes the scales: 0.516 bytes per weight).
    """

    def __init__(self, layer: nn.Linear, device: torch.device) -> None:
        nn.Module.__init__(self)
        self._library = library("bitsandbytes.functional", "8bit")
        self.in_features, self.out_features = layer.in_features, layer.out_features
        flat = layer.weight.detach().to(device).flatten()
        # One block per row: on CPUs, bitsandbytes 0.50 uses wrong scales for a matrix whose rows end inside a block.
        rows = functional.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
        packed, self._state = self._library.quantize_4bit(rows, blocksize=_BLOCK, quant_type="nf4")
        self.weight, self.bias = nn.Parameter(packed, requires_grad=False), layer.bias

    def matrix(self) -> Tensor:
        """Return the dequantized matrix [out, in] in the dtype of the original layer."""
        size = self.out_features * self.in_features
        rows: Tensor = self._library.dequantize_4bit(self.weight, self._state)
        return rows.flatten()[:size].view(self.out_features, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _Product.apply(input, self)  # pyright: ignore[reportAssignmentType]
        return product if self.bias is None else product + self.bias  # pyright: ignore[reportUnnecessaryComparison]


class _Product(torch.autograd.Function):
    """x W^T. The backward pass dequantizes W again; otherwise the matrices of all layers would be kept for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FourBits) -> Tensor:
        ctx.layer, ctx.kind = layer, x.dtype
        return functional.linear(x, layer.matrix())

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        [gradient] = grad_outputs
        # The dtype of the gradient may be wider than that of the matrix, under autocast.
        return (gradient @ ctx.layer.matrix().to(gradient.dtype)).to(ctx.kind), None


def dequantized(model: Any, rank: int) -> LazyWeights:
    """Return the frozen weights of a quantized model under the names of the base model.

    A quantized matrix is dequantized when it is read.

    Args:
        model: the quantized model, with or without adapters.
        rank: rank of this process.
    """
    held, names = lora.base_weights(model), parameter_names(model)
    layers = {names[id(layer.weight)]: layer for layer in model.modules() if isinstance(layer, FourBits)}
    sizes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
    shapes = {name: tuple(value.shape) for name, value in held.items()} | sizes

    def read(name: str) -> Tensor:
        return layers[name].matrix() if name in layers else held[name].detach()

    return LazyWeights(held, read, shapes=shapes, rank=rank)
