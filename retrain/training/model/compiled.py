"""Compile a model's decoder layers on a GPU with torch.compile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from retrain.functional.fused_scores import reason

_ROWS, _WIDTH = 5, 1021
"""Size of the trial. The compiler chooses kernels for the sizes that it meets first. Two sizes that are equal in the
trial must be equal in every batch, or it compiles again: hence primes, a shared prompt and responses of all lengths."""
_SLACK = 0.05
"""Largest error of the compiled layers, relative to the standard deviation of the hidden states."""


def compile_layers(model: Any, trial: Callable[[Tensor, Tensor, Tensor], Tensor]) -> bool:
    """Compile the decoder layers of a model in place, for packed rows of all lengths.

    All layers of a class share the compiled code. A trial computes hidden states and their gradient before and after.
    If it fails, or gives other hidden states, a warning gives the reason and the layers stay as they were.

    Args:
        model: a transformers causal LM.
        trial: computes the model's last hidden states [n, d] in float32 from packed rows, and any gradient of them;
            given token ids [R, S], the mask of tokens that are not padding [R, S] and that of responses [R, S].
    Returns:
        True if the layers are compiled.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        return False
    config = model.config.get_text_config()
    width = min(_WIDTH, getattr(config, "max_position_embeddings", _WIDTH))
    row, column = torch.arange(_ROWS, device=model.device)[:, None], torch.arange(width, device=model.device)
    mask, scored = column < width - row, column >= width // 5
    # Rows share their prompt and differ in the response, as the rows of a group do.
    ids = (7 * column + row * scored) % config.vocab_size

    def hidden() -> Tensor:
        columns = trial(ids, mask, mask & scored)
        model.zero_grad()
        return columns

    # Before compiling: the layers' own results.
    expected = hidden()
    for layer in layers:
        layer.compile(dynamic=True)
    if problem := _problem(hidden, expected):
        for layer in layers:
            layer.compile(disable=True)
        logging.getLogger(__name__).warning("updates are slower, because torch.compile failed: %s", problem)
    return not problem


def _problem(hidden: Callable[[], Tensor], expected: Tensor) -> str:
    """Return why hidden states cannot be computed, or by how much they differ from the expected ones; "" if neither."""
    try:
        error = float((hidden() - expected).square().mean().sqrt() / expected.std())
    except torch.OutOfMemoryError:
        raise
    except Exception as raised:  # a compiler may raise anything
        return reason(raised)
    return "" if error <= _SLACK else f"the layers' results differ by {error:.2g} standard deviations"
