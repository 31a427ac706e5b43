"""Discounted sums over the response tokens of a row, skipping the tokens between them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def pack(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N L"]:
    """Move the masked values of each row to its start, and pad with 0. L is the largest number of them in a row."""
    longest = int(mask.sum(-1).max()) if mask.numel() else 0
    packed = values.new_zeros(len(values), longest)
    packed[_occupied(mask, longest)] = values[mask]
    return packed


def unpack(packed: Float[Tensor, "N L"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """Undo `pack`: move the values back to the masked positions, with 0 elsewhere."""
    values = packed.new_zeros(mask.shape)
    values[mask] = packed[_occupied(mask, packed.shape[1])]
    return values


def discounted_sum(packed: Float[Tensor, "N L"], discount: float | Float[Tensor, " N"]) -> Float[Tensor, "N L"]:
    """Discounted sum of the values from each position to the end of the row: sum_{s>=t} discount^(s-t) * x_s."""
    sums, ahead = torch.empty_like(packed), packed.new_zeros(len(packed))
    # A loop, because a cumulative sum of x_t * discount^t, divided by discount^t, underflows in long rows.
    for position in reversed(range(packed.shape[1])):
        ahead = sums[:, position] = packed[:, position] + discount * ahead
    return sums


def _occupied(mask: Bool[Tensor, "N T"], longest: int) -> Bool[Tensor, "N L"]:
    """Return the positions of packed rows that hold values."""
    return torch.arange(longest, device=mask.device) < mask.sum(-1, keepdim=True)
