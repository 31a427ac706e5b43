"""Statistics over the masked positions of a tensor: those where the mask is True.

Values at other positions have no effect, even if they are NaN.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def keep(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """Return the values, with exactly 0 outside the mask."""
    # Not a product with the mask: NaN * 0 is NaN.
    return values.where(mask, 0.0)


def masked_mean(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, ""]:
    """Mean over all masked positions of the batch; 0 for an empty mask."""
    return keep(values, mask).sum() / mask.sum().clamp(min=1)


def masked_variance(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], ddof: int = 0) -> Float[Tensor, ""]:
    """Variance over all masked positions of the batch; 0 if the mask has at most `ddof` positions."""
    degrees = mask.sum() - ddof
    squares = keep(values - masked_mean(values, mask), mask).square().sum()
    return (squares / degrees.clamp(min=1)).where(degrees > 0, 0.0)


def row_mean(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N 1"]:
    """Mean over the masked positions of each row; 0 for a row that has none."""
    return keep(values, mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def turn_sum(
    values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], turn_ids: Int[Tensor, "N T"]
) -> Float[Tensor, "N T"]:
    """At each masked position, the sum over all masked positions of the same turn of its row; 0 outside the mask.

    `turn_ids` number the turns of a row from 0.
    """
    # Ids outside the mask may be anything, but each must be a valid index.
    ids = turn_ids.masked_fill(~mask, 0)
    sums = values.new_zeros(len(ids), int(ids.max()) + 1)
    return keep(sums.scatter_add(1, ids, keep(values, mask)).gather(1, ids), mask)


def turn_mean(
    values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], turn_ids: Int[Tensor, "N T"]
) -> Float[Tensor, "N T"]:
    """At each masked position, the mean over all masked positions of the same turn of its row; 0 outside the mask."""
    return turn_sum(values, mask, turn_ids) / turn_sum(mask.to(values.dtype), mask, turn_ids).clamp(min=1)


def turn_ends(mask: Bool[Tensor, "N T"], turn_ids: Int[Tensor, "N T"]) -> Bool[Tensor, "N T"]:
    """Return a mask that is True only at the last masked position of each turn."""
    ids = turn_ids.masked_fill(~mask, 0)
    # -1 at positions outside the mask, so that none of them is the last of its turn.
    columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape).masked_fill(~mask, -1)
    last = columns.new_full((len(ids), int(ids.max()) + 1), -1).scatter_reduce(1, ids, columns, "amax")
    return mask & (columns == last.gather(1, ids))


def expand(values: Float[Tensor, " N"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """Repeat the value of each row at all of its masked positions, with 0 elsewhere."""
    return keep(values[:, None].expand(mask.shape), mask)


def top_fraction(
    values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], group_ids: Int[Tensor, " N"], fraction: float
) -> Bool[Tensor, "N T"]:
    """Select the ceil(fraction * n) highest values among the n masked positions of each group, at least one.

    Values equal to the lowest selected value are selected too, so the result does not depend on the order of rows.
    """
    groups = torch.unique(group_ids, return_inverse=True)[1][:, None].expand(mask.shape)[mask]
    flat = values[mask]
    order = flat.argsort(descending=True)
    # A stable sort by group keeps the descending order of values inside each group.
    order = order[groups[order].argsort(stable=True)]
    sizes = torch.bincount(groups)
    starts = sizes.cumsum(0) - sizes
    # Computed in float64 and minus an epsilon, so that ceil(0.3 * 50) is 15 despite binary rounding.
    counts = (sizes.double() * fraction - 1e-9).ceil().long().clamp(min=1)
    lowest = flat[order][starts + counts - 1] if len(flat) else flat
    selected = torch.zeros_like(mask)
    selected[mask] = flat >= lowest[groups]
    return selected


def row_top(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], fraction: float) -> Bool[Tensor, "N T"]:
    """Select the ceil(fraction * n) highest of each row's n masked values, which must be finite.

    Among equal values, the earlier positions are selected.
    """
    order = values.masked_fill(~mask, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    # Minus an epsilon, as in `top_fraction`.
    count = (mask.sum(-1, keepdim=True).double() * fraction - 1e-9).ceil()
    is_high = torch.arange(mask.shape[1], device=mask.device) < count
    return torch.zeros_like(mask).scatter(-1, order, is_high) & mask


def row_above(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], fraction: float) -> Bool[Tensor, "N T"]:
    """Select the masked positions of each row whose value is greater than the (1 - fraction) quantile of the row.

    With the row's n masked values in ascending order, the quantile is the value at index
    min(int((1 - fraction) * n), n - 1), counted from 0.
    """
    count = mask.sum(-1, keepdim=True)
    # An empty row has no index n - 1; it reads the infinity at 0, above which no value is.
    position = torch.minimum(((1 - fraction) * count.double()).long(), (count - 1).clamp(min=0))
    # Infinity sorts the positions outside the mask behind the row's n values.
    threshold = values.masked_fill(~mask, torch.inf).sort(-1).values.gather(-1, position)
    return (values > threshold) & mask
