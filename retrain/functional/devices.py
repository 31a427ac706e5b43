"""Fast dtype and peak memory of a device."""

from __future__ import annotations

import resource
import sys

import torch


def matmul_dtype(device: torch.device) -> torch.dtype:
    """Return the fastest dtype for matrix products on a device.

    This is bfloat16 on an accelerator and on a CPU with AVX-512 BF16, where it is twice as fast as float32, and float32
    on other CPUs.
    """
    if device.type != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16", False):
        return torch.bfloat16
    return torch.float32


def peak_memory(device: torch.device) -> float:
    """Return the peak memory of this process in bytes, on the GPU if the device is one, else in main memory."""
    if device.type == "cuda":
        # Reserved and not allocated: what the caching allocator keeps is lost to other processes, too.
        return float(torch.cuda.max_memory_reserved(device))
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage reports bytes on macOS and kilobytes on Linux
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
