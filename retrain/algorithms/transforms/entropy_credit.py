"""GTPO and GRPO-S as published: rewards shaped by entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from retrain import functional as F
from retrain.registry import advantage, transform

if TYPE_CHECKING:
    from torch import Tensor

ShapingStrength = Annotated[float, Field(ge=0)]
Smallest = Annotated[float, Field(gt=0)]


@transform("gtpo_paper")
def gtpo_paper(  # noqa: PLR0913 - four columns and four keys
    entropy: Tensor,
    correct: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    alpha1: ShapingStrength = 1.0,
    alpha2: ShapingStrength = 0.1,
    norm: Literal["group", "batch"] = "group",
    eps: Smallest = 1e-8,
) -> Tensor:
    """Shaped token rewards: a bonus for high entropy in correct rows, a penalty for low entropy in wrong rows.

    r+ = alpha1 + alpha2 * H_it / (sum_{j in P} H_jt + eps) * |P| on correct rows, 0 on wrong rows
    r- = -alpha1 - alpha2 * (1/(H_it + eps)) / (sum_{j in Q} 1/(H_jt + eps)) * |Q| on wrong rows, 0 on correct rows
    A  = (r+ - mean r+) / (sd r+ + eps) on correct rows, the same with r- on wrong rows

    P and Q are the group's correct and wrong rows that have a t-th response token. Means and population
    standard deviations are over all response tokens of the group (or batch), including the zeros; without
    these, half of the tokens of correct rows would get a negative advantage. It replaces the advantages
    before it, and uses rewards through `correct` only.

    Args:
        entropy: [N, T] nats, of the sampling policy, without gradient; correct: [N] bool;
            response_mask: [N, T] bool; group_ids: [N] int.
        alpha1: size of the reward; alpha2: size of the bonus.
        norm: compute statistics per "group", where a group that is all correct or all wrong gets 0, or over
            the "batch", as in the paper's text.
        eps: added to every denominator.
    Returns:
        [N, T] without unit.
    References: Tan et al., GTPO and GRPO-S, arXiv:2508.04349, equations 3, 5 and 6.
    """
    import torch

    entropy = F.masked.keep(entropy, response_mask)
    # Numbers from 0, so that group * width + position is unique.
    groups = torch.unique(group_ids, return_inverse=True)[1][:, None].expand(response_mask.shape)
    width = response_mask.shape[1]
    # A cell is a group's t-th response token. Positions outside the mask are never read.
    cells = groups * width + (response_mask.cumsum(-1) - 1).clamp(min=0)
    right = response_mask & correct[:, None]
    wrong = response_mask & ~correct[:, None]
    bonus = alpha2 * _share(entropy, cells, right, eps)
    # eps is in every reciprocal already, so the sum of them needs none.
    penalty = alpha2 * _share(1 / (entropy + eps), cells, wrong, 0.0)
    tokens = groups if norm == "group" else groups * 0
    credit = _normalised((alpha1 + bonus).where(right, 0.0), tokens, response_mask, eps)
    debit = _normalised((-alpha1 - penalty).where(wrong, 0.0), tokens, response_mask, eps)
    # The zeros of the other kind of rows count in the statistics and get no advantage of their own.
    shaped = credit.where(right, debit)
    if norm == "group":
        # Within a group of one kind, entropy alone would decide which answers are good.
        shaped = shaped.where(_mixed(correct, group_ids)[:, None], 0.0)
    return F.masked.keep(shaped, response_mask)


@advantage("grpo_s")
def grpo_s(  # noqa: PLR0913 - four columns and three keys
    entropy: Tensor,
    correct: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    beta1: ShapingStrength = 1.0,
    beta2: ShapingStrength = 0.1,
    eps: Smallest = 1e-8,
) -> Tensor:
    """Shaped episode rewards: the sequence form of `gtpo_paper`, with the mean entropy h of a row.

    r+ = beta1 + beta2 * h_i / (sum_{j in P} h_j + eps) * |P| on correct rows, 0 on wrong rows
    r- = -beta1 - beta2 * (1/(h_i + eps)) / (sum_{j in Q} 1/(h_j + eps)) * |Q| on wrong rows, 0 on correct rows
    A  = (r+ - mean r+) / (sd r+ + eps) on correct rows, the same with r- on wrong rows

    P and Q are the group's correct and wrong rows. Means and population standard deviations are over all
    rows of the group, including the zeros. The column `entropy` needs a scoring forward pass before the
    filter.

    Args:
        entropy: [N, T] nats, of the sampling policy, without gradient; correct: [N] bool;
            response_mask: [N, T] bool; group_ids: [N] int.
        beta1: size of the reward; beta2: size of the bonus.
        eps: added to every denominator.
    Returns:
        [N] without unit; 0 in a group that is all correct or all wrong.
    References: Tan et al., GTPO and GRPO-S, arXiv:2508.04349.
    """
    import torch

    groups = torch.unique(group_ids, return_inverse=True)[1][:, None]
    mean = F.masked.row_mean(entropy, response_mask)
    right, wrong = correct[:, None], ~correct[:, None]
    everyone = torch.ones_like(right)
    bonus = beta2 * _share(mean, groups, right, eps)
    penalty = beta2 * _share(1 / (mean + eps), groups, wrong, 0.0)
    credit = _normalised((beta1 + bonus).where(right, 0.0), groups, everyone, eps)
    debit = _normalised((-beta1 - penalty).where(wrong, 0.0), groups, everyone, eps)
    shaped = credit.where(right, debit)[:, 0]
    return shaped.where(_mixed(correct, group_ids), 0.0)


def _share(values: Tensor, cells: Tensor, members: Tensor, eps: float) -> Tensor:
    """Value divided by the mean of its cell's members, v / (sum + eps) * count; 0 for values that are not members.

    Args:
        values: [N, T]; cells: [N, T] int, cell of each value; members: [N, T] bool.
        eps: added to the sum.
    """
    import torch

    shares = torch.zeros_like(values)
    chosen, cell = values[members], cells[members]
    total = F.groups.group_sum(chosen, cell) + eps
    shares[members] = chosen / total * F.groups.group_size(cell)
    return shares


def _normalised(values: Tensor, cells: Tensor, mask: Tensor, eps: float) -> Tensor:
    """Normalised value (v - mean) / (sd + eps), with statistics of the masked entries of its cell; 0 if they are equal.

    Args:
        values: [N, T]; cells: [N, T] int, cell of each value; mask: [N, T] bool.
        eps: added to the standard deviation.
    """
    import torch

    normalised = torch.zeros_like(values)
    chosen, cell = values[mask], cells[mask]
    spread = F.groups.group_std(chosen, cell)
    normalised[mask] = ((chosen - F.groups.group_mean(chosen, cell)) / (spread + eps)).where(spread > 0, 0.0)
    return normalised


def _mixed(correct: Tensor, group_ids: Tensor) -> Tensor:
    """Return [N] bool, True if the row's group has both correct and wrong rows."""
    right = F.groups.group_size(group_ids, correct)
    return (right > 0) & (right < F.groups.group_size(group_ids))
