"""Stochastic rounding to bfloat16."""

import torch
from jaxtyping import Float
from torch import Tensor

_BLOCK = 1 << 16
"""Number of values processed at a time on a CPU. Temporary tensors stay in its cache, which is twice as fast."""
_BFLOAT16_BITS = -(1 << 16)
"""Mask of the upper 16 bits of a float32, which form a bfloat16."""


@torch.no_grad()
def stochastic(values: Float[Tensor, "..."], generator: torch.Generator, out: Float[Tensor, "..."]) -> None:
    """Round each value at random to one of the two nearest bfloat16 numbers, and write it into `out`.

    For a value x between bfloat16 numbers a <= x < b the result is b with probability (x - a) / (b - a), so its mean
    is x. A value that is a bfloat16 number does not change.

    Args:
        values: [...] float32, finite.
        generator: random generator on the device of the values.
        out: [...] float32, contiguous; may be `values`.
    References: Gupta et al., Deep Learning with Limited Numerical Precision, arXiv:1502.02551 (stochastic rounding).
    """
    flat = values.reshape(-1)
    target = out.view(-1)  # `view` and not `reshape`, which could write into a copy
    size = _BLOCK if flat.device.type == "cpu" else max(1, len(flat))
    for block, rounded in zip(flat.split(size), target.split(size), strict=True):
        # Each draw gives four 16-bit numbers. One of them is added to the lower half of each float32, and the carry
        # rounds the upper half up.
        draws = torch.empty(-(-len(block) // 4), dtype=torch.int64, device=block.device)
        noise = draws.random_(-(2**63), None, generator=generator).view(torch.int16)[: len(block)]
        bits = noise.to(torch.int32).bitwise_and_(0xFFFF).add_(block.view(torch.int32)).bitwise_and_(_BFLOAT16_BITS)
        rounded.copy_(bits.view(torch.float32))
