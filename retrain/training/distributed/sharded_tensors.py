"""Tensors of which a rank may have only some rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from retrain.protocols import CheckpointRows, Ranks


def device_of(ranks: Ranks) -> torch.device:
    """Return the device of this rank's weights."""
    kind = ranks.mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def full(tensor: Tensor) -> Tensor:
    """Return a sharded tensor gathered from all ranks, or a whole tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a sharded tensor, or a whole tensor itself; both share memory with the argument."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Return True if the rows of this tensor are divided among the ranks."""
    return isinstance(tensor, DTensor)


def like(value: Tensor | CheckpointRows, parameter: Tensor) -> Tensor:
    """Return a copy of a value on the parameter's device, sharded like the parameter if it has the same shape.

    Args:
        value: a tensor, or rows of a checkpoint, of which only those that this rank needs are read.
        parameter: the parameter that the value belongs to; the value may also be an optimizer's scalar.
    """
    if isinstance(value, CheckpointRows):
        if not isinstance(parameter, DTensor):
            return value.between(0, value.count).to(parameter.device)
        # FSDP2 gives every rank ceil(rows / ranks) rows, except the last ones.
        mesh = parameter.device_mesh
        share = -(-value.count // mesh.size())
        first, end = (min(value.count, index * share) for index in (mesh.get_rank(), mesh.get_rank() + 1))
        rows = value.between(first, end).to(parameter.device)
        return DTensor.from_local(
            rows, mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
        )
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        ).clone()
    return value.detach().clone().to(parameter.device)
