"""A correction in the place of `tis` that does nothing: stale samples count as if drawn from the present policy.

transform_mode = "uncorrected.uncorrected"
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain import transform

if TYPE_CHECKING:
    from torch import Tensor


@transform("uncorrected", correction=True)
def uncorrected(advantages: Tensor) -> Tensor:
    """Return the advantages [N, T] as they are."""
    return advantages
