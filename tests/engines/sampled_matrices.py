# pyright: reportAttributeAccessIssue=false
"""The matrices that an engine samples with, read off its products with unit vectors."""

from collections.abc import Callable
from typing import Any

import torch

from tests.training.small_models import exact_updates

FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Layers of the model by the field of the fused decoder's layer."""


def fused_matrix(engine: Any, policy: Any, name: str) -> torch.Tensor:
    """What the fused decoder multiplies by where the model has the matrix of this name."""
    _, _, layer, leaf = name.removesuffix(".weight").split(".", 3)
    field, leaves = next((field, leaves) for field, leaves in FUSED.items() if leaf in leaves)
    base = policy.reference_weights()
    sizes = [len(base[f"model.layers.{layer}.{one}.weight"]) for one in leaves]
    held = getattr(engine._decoder._layers[int(layer)], field)
    products = engine._decoder._linear(torch.eye(held.weight.shape[1]), held).double().T
    return products.split(sizes)[leaves.index(leaf)]


def module_matrix(model: Any, name: str) -> torch.Tensor:
    """The same of a transformers model."""
    layer = model.get_submodule(name.removesuffix(".weight"))
    transposed = type(layer).__name__ == "Conv1D"
    products = layer(torch.eye(layer.weight.shape[0 if transposed else 1])).double()
    products = products if layer.bias is None else products - layer.bias.double()
    return products if transposed else products.T


def worst(policy: Any, matrix: Callable[[str], torch.Tensor]) -> float:
    """The largest ||sampled - (W + BA)|| / ||BA|| of any adapted matrix."""
    base, updates = policy.reference_weights(), exact_updates(policy)
    assert updates
    errors = {name: matrix(name).double() - base[name].double() - update for name, update in updates.items()}
    return max(float(error.norm() / updates[name].norm()) for name, error in errors.items())
