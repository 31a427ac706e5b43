"""Response tokens of a row, one after the other, without the tokens between them."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def pack(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N L"]:
    """Move the masked values of each row to its start, and pad with 0. L is the longest row."""
    longest = int(mask.sum(-1).max()) if mask.numel() else 0
    packed = values.new_zeros(len(values), longest)
    packed[_filled(mask, longest)] = values[mask]
    return packed


def unpack(packed: Float[Tensor, "N L"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """The inverse of `pack`: values back at the masked positions, 0 elsewhere."""
    values = packed.new_zeros(mask.shape)
    values[mask] = packed[_filled(mask, packed.shape[1])]
    return values


def discounted_sum(packed: Float[Tensor, "N L"], discount: float | Float[Tensor, " N"]) -> Float[Tensor, "N L"]:
    """sum_{s>=t} discount^(s-t) * x_s for every position t of a row."""
    sums, ahead = torch.empty_like(packed), packed.new_zeros(len(packed))
    for position in reversed(range(packed.shape[1])):
        ahead = sums[:, position] = packed[:, position] + discount * ahead
    return sums


def _filled(mask: Bool[Tensor, "N T"], longest: int) -> Bool[Tensor, "N L"]:
    return torch.arange(longest, device=mask.device) < mask.sum(-1, keepdim=True)
