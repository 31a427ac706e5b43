"""Fast dtype and memory use of a device."""

from __future__ import annotations

import resource
import sys

import torch


def matmul_dtype(device: torch.device) -> torch.dtype:
    """The dtype of matrix products that suits a device.

    bfloat16 on an accelerator, and on a processor that multiplies it in hardware (AVX-512 BF16, twice as
    fast there); float32 on any other.
    """
    if device.type != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16", False):
        return torch.bfloat16
    return torch.float32


def peak_memory(device: torch.device) -> float:
    """Peak memory of this process in bytes: of the GPU if the device is one, else of the machine."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_reserved(device))
    unit = 1 if sys.platform == "darwin" else 1024  # the unit of getrusage
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
