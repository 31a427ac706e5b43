"""Credit for answers above their group's mean, and for those below it, with a weight of its own each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from retrain import transform

if TYPE_CHECKING:
    from torch import Tensor

Weight = Annotated[float, Field(ge=0)]


@transform("signs")
def signs(advantages: Tensor, *, above: Weight = 1.0, below: Weight = 1.0) -> Tensor:
    """Return the advantages [N, T], positive ones times `above` and negative ones times `below`."""
    return advantages.clamp(min=0) * above + advantages.clamp(max=0) * below
