"""Rounding to bfloat16 numbers that is right on average."""

import torch
from jaxtyping import Float
from torch import Tensor

_BLOCK = 1 << 16
"""Values at a time: temporary tensors stay in a processor's cache, which is twice as fast."""
_KEPT = -(1 << 16)
"""Mask of the bits of a float32 that a bfloat16 has."""


@torch.no_grad()
def stochastic(values: Float[Tensor, "..."], generator: torch.Generator, out: Float[Tensor, "..."]) -> None:
    """Write each value, rounded at random to one of its two neighbours among the bfloat16 numbers, into `out`.

    With the neighbours a <= x < b, the result is b with probability (x - a) / (b - a), so its mean is x. A bfloat16
    number stays as it is.

    Args:
        values: [...] float32, finite.
        generator: of the values' device; all randomness comes from it.
        out: [...] float32, contiguous; may be `values`.
    References: Gupta et al., Deep Learning with Limited Numerical Precision, arXiv:1502.02551 (stochastic rounding).
    """
    flat, target = values.reshape(-1), out.view(-1)
    size = _BLOCK if flat.device.type == "cpu" else max(1, len(flat))
    for part, result in zip(flat.split(size), target.split(size), strict=True):
        # Four 16-bit numbers from each draw; the lower half of a float32 plus one of them carries into the upper half.
        draws = torch.empty(-(-len(part) // 4), dtype=torch.int64, device=part.device)
        noise = draws.random_(-(2**63), None, generator=generator).view(torch.int16)[: len(part)]
        bits = noise.to(torch.int32).bitwise_and_(0xFFFF).add_(part.view(torch.int32)).bitwise_and_(_KEPT)
        result.copy_(bits.view(torch.float32))
