"""What a device computes fast, and how much memory of it is used."""

from __future__ import annotations

import os
import resource
import sys

import torch

_PARAMETERS_PER_THREAD = 5_000_000
"""From the third thread on: below that a product is over before more threads have begun it."""


def cpu_threads(parameters: int, sharing: int = 1) -> int:
    """Threads for the training of a model on a processor.

    OMP_NUM_THREADS where it is set, read from the environment and not from torch: a fork has torch as its maker set it
    up. Otherwise min(cores / sharing, max(2, parameters / 5 million)), and at least 1, of the cores that this process
    may use.

    Args:
        parameters: of the model.
        sharing: processes, and threads with products of their own, among which the cores are divided.
    """
    said = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if said.isdecimal() and int(said):
        return int(said)
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(cores // sharing, max(2, parameters // _PARAMETERS_PER_THREAD)))


def matmul_dtype(device: torch.device) -> torch.dtype:
    """The dtype of matrix products that suits a device.

    bfloat16 on an accelerator, and on a processor that multiplies it in hardware (AVX-512 BF16, twice as
    fast there); float32 on any other.
    """
    if device.type != "cpu" or torch.cpu.get_capabilities().get("avx512_bf16", False):
        return torch.bfloat16
    return torch.float32


def peak_memory(device: torch.device) -> float:
    """Bytes that this process has held at most: of the GPU if the device is one, else of the machine's memory."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_reserved(device))
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)
