"""Models on several ranks: replicated, or sharded by FSDP2, which no other module uses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from retrain.errors import EngineError
from retrain.functional.weights import LazyWeights, ParameterReader
from retrain.protocols import Ranks, Shards
from retrain.training.distributed.sharded_tensors import device_of, full
from retrain.training.model.loading import fill, parameter_names
from retrain.training.settings import PolicySettings


class Replicated(Shards):
    """A model whose weights are complete on every rank."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def sum_gradients(self, parameters: list[Tensor]) -> None:
        """Sum the gradients that FSDP does not sum, in a single all-reduce.

        A gradient that is None on every rank stays None.
        """
        whole = [p for p in parameters if not isinstance(p, DTensor)]
        if not whole:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in whole]
        # Sent along with the gradients, so that one all-reduce suffices.
        has_gradient = gradients[0].new_tensor([p.grad is not None for p in whole])
        summed = self.ranks.all_reduce(torch.cat([*(gradient.flatten() for gradient in gradients), has_gradient]))
        *sums, counts = summed.split([*(p.numel() for p in whole), len(whole)])
        for p, gradient, count in zip(whole, sums, counts.tolist(), strict=True):
            p.grad = gradient.view_as(p) if count else None


class Sharded(Replicated):
    """A model that FSDP2 shards over the ranks: each layer is one unit, and all other weights are another.

    Gradients are summed over the ranks in float32, and not averaged, because the denominators of the loss count the
    rows of all ranks.

    Args:
        model: a transformers causal LM.
        settings: settings of its training: dtype, LoRA and offload.
        ranks: the processes that share the model.
        source: reads the values of parameters on the meta device. They are read one module at a time, so that no
            process ever holds all weights.
    """

    def __init__(self, model: Any, settings: PolicySettings, ranks: Ranks, source: ParameterReader | None) -> None:
        super().__init__(ranks)
        self._blank = None if settings.lora else _blank(model)  # with LoRA a second model shares the base
        self._root: Any = _Root(model)
        self.casts, self.device = settings.dtype != "float32", device_of(ranks)
        options: dict[str, Any] = {
            "mesh": ranks.mesh,
            # Also for the root, which FSDP keeps whole by default: the optimizer needs its sharded parameters.
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=getattr(torch, settings.dtype) if self.casts else None, reduce_dtype=torch.float32
            ),
            # LoRA's adapters stay whole: a unit of FSDP has one dtype, and merging and saving need whole adapters.
            "ignored_params": {p for p in model.parameters() if p.requires_grad} if settings.lora else set(),
            "offload_policy": OffloadPolicy(),
        }
        if settings.offload == "all":
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        for p in options["ignored_params"]:
            p.data = p.data.to(self.device)
        called = parameter_names(model)
        for module in [*layers, self._root]:
            if source is not None:
                fill(module, lambda p: source(called[id(p)]))
            fully_shard(module, **options)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale within a reduction
        self._model, self._options = model, options

    def spread(self, head: Any, settings: PolicySettings) -> Any:
        """Return a head, moved to the device and sharded like the model; with LoRA it stays whole, like adapters."""
        head.to(self.device)
        if settings.lora is None:
            options: dict[str, Any] = {**self._options, "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
            fully_shard(head, **options)
            head.set_gradient_divide_factor(1.0)
            head.set_force_sum_reduction_for_comms(True)
        return head

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._root(function, *args)

    def recover(self) -> None:
        """Reshard the layers that a failed forward pass left gathered.

        Otherwise later gradients would go to the gathered parameters, which the optimizer does not have.

        Raises:
            EngineError: this version of torch cannot do that.
        """
        try:
            self._root.reset_iter_state()
        except AttributeError as error:
            raise EngineError(
                f"torch {torch.__version__} cannot continue after a forward pass that failed in sharded layers; "
                'install torch 2.13, or set [distributed] shard = "none"'
            ) from error

    def copied(self, model: Any) -> tuple[Any, ParameterReader | None]:
        parameters = dict(self._model.named_parameters())
        return copy.deepcopy(self._blank), lambda name: full(parameters[name].detach())

    def full(self, tensor: Tensor) -> Tensor:
        return full(tensor)

    def whole(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return _gathered(tensors)


class _Root(nn.Module):
    """Calls a function inside its own forward, during which FSDP gathers the weights that belong to no layer."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def _blank(model: Any) -> Any:
    """Copy the model's structure and buffers, with parameters on the meta device.

    Later copies are made from this one, because FSDP does not allow copying a sharded model.
    """
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _gathered(tensors: Mapping[str, Tensor]) -> LazyWeights:
    """Return tensors that are gathered when they are read; a tied one is gathered once while a caller holds it."""
    gathered: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def read(name: str) -> Tensor:
        value = tensors[name]
        if not isinstance(value, DTensor):
            return value.detach()
        tensor = gathered.get(id(value))
        if tensor is None:
            with torch.inference_mode(False):  # engines read weights in inference mode, in which DTensor fails
                tensor = gathered[id(value)] = full(value.detach())
        return tensor

    mesh = next(value.device_mesh for value in tensors.values() if isinstance(value, DTensor))
    return LazyWeights(tensors, read, rank=mesh.get_rank())
