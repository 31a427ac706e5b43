"""Tests of what `Forward` assumes of a model. They hold for any weights: no result depends on how small a value is.

A comparison of two results would pass while a cap or a leak between rows is small, as it is in a model whose training
begins or in 16 bits, and would be wrong later.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_LARGEST = 1000.0
"""Largest logit that `final_cap` passes through the model: far above any cap."""


class InFloat32(TorchFunctionMode):
    """Compute in float32, whatever the dtype of the weights.

    A 16-bit tensor is converted just before an operation reads it, so that only one weight at a time exists twice.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        # An operation in place must write to the tensor itself and not to its copy.
        first = args[:1] if name.endswith("_") and not name.endswith("__") else ()
        return func(*first, *tree_map(_wide, args[len(first) :]), **tree_map(_wide, dict(kwargs or {})))


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16) else value


def final_cap(model: Any, logits_of: Callable[[], Tensor], hidden_of: Callable[[], Tensor]) -> float | None:
    """Return the soft cap of the logits: cap * tanh(output / cap) of the output embedding; 0 if there is none.

    The output embedding's result is replaced by known numbers, so that the test does not depend on the weights.

    Args:
        model: a transformers causal LM.
        logits_of: runs the model and returns its logits [cells, V].
        hidden_of: runs the model without its head and returns the last hidden states [cells, d].
    Returns:
        None if the logits are not made from the output embedding of the last hidden states in one of these ways.
    """
    head = model.get_output_embeddings()
    seen: list[tuple[Tensor, Tensor]] = []

    def replace(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # Numbers of all sizes, so that a cap at any height shows.
        ramp = torch.linspace(-_LARGEST, _LARGEST, output.shape[-1], device=output.device, dtype=output.dtype)
        seen.append((inputs[0].flatten(0, -2), ramp))
        return ramp.expand_as(output)

    handle = head.register_forward_hook(replace)
    try:
        logits = logits_of()
    finally:
        handle.remove()
    # Exactly equal, because both are the same computation.
    if len(seen) != 1 or not torch.equal(seen[0][0], hidden_of()):
        return None
    ramp = seen[0][1].to(logits.dtype)
    config = model.config.get_text_config().to_dict()
    caps = [value for key, value in config.items() if "cap" in key and isinstance(value, (int, float)) and value > 0]
    return next((cap for cap in (0, *caps) if torch.allclose(soft_capped(ramp, cap).expand_as(logits), logits)), None)


def soft_capped(logits: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(logits / cap), in the operations and thus the rounding of transformers; 0 is no cap."""
    return torch.tanh(logits / cap) * cap if cap else logits


@contextmanager
def poisoned(model: Any, token: int) -> Generator[None]:
    """Replace the embedding of one token of a packed list by NaN, which reaches whatever depends on it."""

    def poison(module: Any, inputs: Any, output: Tensor) -> Tensor:
        cells = torch.arange(output.shape[-2], device=output.device) == token
        # NaN survives every operation; a large number may be lost in rounding.
        return output.masked_fill(cells[:, None], torch.nan)

    handle = model.get_input_embeddings().register_forward_hook(poison)
    try:
        yield
    finally:
        handle.remove()
