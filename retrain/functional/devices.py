"""What a device computes fast."""

from __future__ import annotations

import torch


def matmul_dtype(device: torch.device) -> torch.dtype:
    """The dtype of matrix products that suits a device.

    bfloat16 on an accelerator, and on a processor that multiplies it in hardware (AVX-512 BF16, twice as
    fast there); float32 on any other.
    """
    if device.type != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16", False):
        return torch.bfloat16
    return torch.float32
