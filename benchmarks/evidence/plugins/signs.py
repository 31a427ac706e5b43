"""Credit for answers above their group's mean, and for those below it, with a weight of its own each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from retrain import transform

if TYPE_CHECKING:
    from torch import Tensor

Weight = Annotated[float, Field(ge=0)]


@transform("signs", metrics={"signs/entropy": "mean entropy of the tokens of all rollouts, in nats"})
def signs(
    advantages: Tensor, entropy: Tensor, response_mask: Tensor, *, above: Weight = 1.0, below: Weight = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the advantages [N, T], positive ones times `above` and negative ones times `below`, and a metric.

    A weight of 0 leaves rows without credit, which `policy/entropy` does not include. The metric includes every row.
    """
    weighed = advantages.clamp(min=0) * above + advantages.clamp(max=0) * below
    return weighed, {"signs/entropy": entropy[response_mask].mean()}
