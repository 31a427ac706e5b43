"""Which groups are worth an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retrain import functional as F
from retrain.registry import Finding, filter

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
    keep = F.groups.group_size(group_ids, alive) > 0
    return keep, _skipped(keep, correct, group_ids)


def _check_band(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """A band that no group of this size can be in drops everything."""
    low, high, size = params["low"], params["high"], config.training.group_size
    shares = [right / size for right in range(size + 1)]
    if not any(low <= share <= high if params["inclusive"] else low < share < high for share in shares):
        yield Finding(
            (),
            f"no group of {size} can have a share of correct answers between low = {low:g} and high = {high:g}: every "
            "group would be dropped",
            "widen [accuracy_band] low and high, or raise [training] group_size",
        )


@filter("accuracy_band", check=_check_band)
def accuracy_band(
    correct: Tensor,
    group_ids: Tensor,
    *,
    low: Annotated[float, Field(ge=0, le=1)] = 0.2,
    high: Annotated[float, Field(ge=0, le=1)] = 0.8,
    inclusive: bool = False,
) -> tuple[Tensor, dict[str, float]]:
    """Keep prompts that are neither too hard nor too easy: low < share of correct answers < high.

    It reads no advantages, so what it drops is dropped before any credit is computed.

    Args:
        correct: [N] bool; group_ids: [N] int.
        low, high: the band; inclusive: its ends belong to it.
    Returns:
        [N] bool, and the number of groups dropped, as `uninformative` reports it.
    References: Cui et al., PRIME, arXiv:2502.01456 (online prompt filtering).
    """
    # In float64 the quotient 4/5 is the very number that 0.8 is, so an end of the band is met exactly.
    share = F.groups.group_size(group_ids, correct).double() / F.groups.group_size(group_ids)
    keep = (share >= low) & (share <= high) if inclusive else (share > low) & (share < high)
    return keep, _skipped(keep, correct, group_ids)


@filter("none", drops=False)
def none(group_ids: Tensor) -> Tensor:
    """Keep every row: [N] bool."""
    return group_ids.bool() | True


def _skipped(keep: Tensor, correct: Tensor, group_ids: Tensor) -> dict[str, float]:
    """Groups that are not kept, by what their answers were."""
    size = F.groups.group_size(group_ids)
    right = F.groups.group_size(group_ids, correct)

    def groups(rows: Tensor) -> float:
        return float(len(group_ids[~keep & rows].unique()))

    return {
        "skipped/all_correct": groups(right == size),
        "skipped/all_wrong": groups(right == 0),
        "skipped/other": groups((right > 0) & (right < size)),
    }
