"""Which groups are worth an update."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain import functional as F
from retrain.registry import filter

if TYPE_CHECKING:
    from torch import Tensor


@filter("uninformative")
def uninformative(advantages: Tensor, correct: Tensor, group_ids: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Keep groups with any advantage that is not 0, after all transforms.

    Rewards are not what is tested: DCA gives an all-correct group a useful signal.

    Args:
        advantages: [N, T]; correct: [N] bool; group_ids: [N] int.
    Returns:
        [N] bool, and the number of groups dropped as skipped/all_correct, skipped/all_wrong and skipped/other.
    """
    alive = (advantages != 0).any(-1)
    size = F.groups.group_size(group_ids)
    keep = F.groups.group_size(group_ids, alive) > 0
    right = F.groups.group_size(group_ids, correct)

    def groups(rows: Tensor) -> float:
        return float(len(group_ids[~keep & rows].unique()))

    return keep, {
        "skipped/all_correct": groups(right == size),
        "skipped/all_wrong": groups(right == 0),
        "skipped/other": groups((right > 0) & (right < size)),
    }


@filter("none")
def none(group_ids: Tensor) -> Tensor:
    """Keep every row: [N] bool."""
    return group_ids.bool() | True
