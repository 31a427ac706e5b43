"""Decorated plug-ins read whole columns as tensors, and their keyword-only parameters are a TOML table.

transform_mode = "plugins.decorated.fading"

[algorithm.transform_params]
floor = 0.2
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from retrain import signal, transform

if TYPE_CHECKING:
    from torch import Tensor


@signal("progress")
def progress(response_mask: Tensor) -> Tensor:
    """How far each token is into its response: from just above 0 to 1 at the last token; [N, T].

    A signal is computed when a component names it as a parameter, once per batch.
    """
    position = response_mask.cumsum(-1)
    return position / position.amax(-1, keepdim=True).clamp(min=1) * response_mask


@transform("fading")
def fading(advantages: Tensor, progress: Tensor, *, floor: Annotated[float, Field(ge=0, le=1)] = 0.2) -> Tensor:
    """A_t max(floor, 1 - progress_t): early tokens get most of the credit; [N, T]."""
    return advantages * (1 - progress).clamp(min=floor)
