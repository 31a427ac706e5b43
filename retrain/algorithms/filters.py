"""Filters, which select the groups to train on."""

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
    """Keep groups with a nonzero advantage after all transforms.

    keep_g = any A_t != 0 over the tokens of group g

    It tests advantages and not rewards, because DCA gives an all-correct group advantages.

    Args:
        advantages: [N, T]; correct: [N] bool; group_ids: [N] int.
    Returns:
        [N] bool, and the number of groups dropped as skipped/all_correct, skipped/all_wrong and skipped/other.
    """
    alive = (advantages != 0).any(-1)
    # A whole group stays or goes: its other rows are the baseline of the rows with credit.
    keep = F.groups.group_size(group_ids, alive) > 0
    return keep, _skipped(keep, correct, group_ids)


def _check_band(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Find a band that contains no possible share of correct answers, so that every group would be dropped."""
    low, high, size = params["low"], params["high"], config.training.group_size
    shares = [right / size for right in range(size + 1)]
    if not any(low <= share <= high if params["inclusive"] else low < share < high for share in shares):
        yield Finding(
            (),
            f"no group of {size} can have a share of correct answers between low = {low:g} and high = {high:g}, so "
            "every group would be dropped",
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
    """Keep prompts that are neither too hard nor too easy.

    keep_g = low < share of correct answers in group g < high

    It reads no advantages, so groups are dropped before credit is computed.

    Args:
        correct: [N] bool; group_ids: [N] int.
        low, high: bounds of the share.
        inclusive: the bounds belong to the band.
    Returns:
        [N] bool, and the numbers of dropped groups as in `uninformative`.
    References: Cui et al., PRIME, arXiv:2502.01456 (online prompt filtering).
    """
    # In float64 the quotient 4/5 equals the number 0.8, so that a share on a bound is recognised.
    share = F.groups.group_size(group_ids, correct).double() / F.groups.group_size(group_ids)
    keep = (share >= low) & (share <= high) if inclusive else (share > low) & (share < high)
    return keep, _skipped(keep, correct, group_ids)


@filter("none")
def none(group_ids: Tensor) -> Tensor:
    """Keep every row; returns [N] bool, all True."""
    return group_ids.bool() | True  # `torch.ones_like` needs torch, which this module does not import


def _skipped(keep: Tensor, correct: Tensor, group_ids: Tensor) -> dict[str, float]:
    """Return the numbers of dropped groups whose answers are all correct, all wrong, or mixed."""
    size = F.groups.group_size(group_ids)
    right = F.groups.group_size(group_ids, correct)

    def groups(rows: Tensor) -> float:
        # Groups and not rows, because a group is dropped as a whole.
        return float(len(group_ids[~keep & rows].unique()))

    return {
        "skipped/all_correct": groups(right == size),
        "skipped/all_wrong": groups(right == 0),
        "skipped/other": groups((right > 0) & (right < size)),
    }
