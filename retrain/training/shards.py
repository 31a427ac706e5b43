"""How a model's weights lie on the ranks. The only module that knows FSDP2 and its tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from retrain.training.ranks import ALONE, Ranks
from retrain.training.settings import PolicySettings

Source = Callable[[str], Tensor]
"""Gives the full tensor of a parameter by its name; where weights are sharded, every rank must ask for the same."""


class Whole:
    """A model whose weights are complete on every rank; for a process alone, nothing.

    Attributes:
        ranks: who works on it.
        casts: FSDP casts the weights to the type of the matrix products, so autocast must not.
    """

    casts = False

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function that uses the model's modules."""
        return function(*args)

    def recover(self) -> None:
        """A function that `run` called has raised, and training goes on."""

    def copied(self, model: Any) -> tuple[Any, Source | None]:
        """The model again, and where the values of its parameters come from if it has none."""
        return copy.deepcopy(model), None

    def sum_gradients(self, parameters: list[Tensor]) -> None:
        """Sum gradients that FSDP does not sum over the ranks, in one message; one that nobody has stays None."""
        own = [p for p in parameters if not isinstance(p, DTensor)]
        if self.ranks.size == 1 or not own:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        known = gradients[0].new_tensor([p.grad is not None for p in own])
        summed = self.ranks.sum(torch.cat([*(gradient.flatten() for gradient in gradients), known]))
        *sums, counts = summed.split([*(p.numel() for p in own), len(own)])
        for p, gradient, count in zip(own, sums, counts.tolist(), strict=True):
            p.grad = gradient.view_as(p) if count else None


WHOLE = Whole()


class Sharded(Whole):
    """A model whose layers, and then what is left, are spread over the ranks by FSDP2.

    The gradients are sums over the ranks, in float32: the loss has global denominators.

    Args:
        source: gives the values of parameters on the meta device, one module at a time, so that no process ever holds
            a full copy.
    """

    def __init__(self, model: Any, settings: PolicySettings, ranks: Ranks, source: Source | None) -> None:
        super().__init__(ranks)
        self._blank = None if settings.lora else _blank(model)  # adapters share their base instead
        self._root: Any = _Root(model)
        self.casts = settings.dtype != "float32"
        options: dict[str, Any] = {
            "mesh": ranks.mesh,
            # Resharding the root after a forward as well: its parameters are the optimizer's at all times.
            "reshard_after_forward": True,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=getattr(torch, settings.dtype) if self.casts else None, reduce_dtype=torch.float32
            ),
            "offload_policy": CPUOffloadPolicy() if settings.offload == "all" else OffloadPolicy(),
            # LoRA's adapters: FSDP wants one precision in a group, and everybody else wants whole adapters.
            "ignored_params": {p for p in model.parameters() if p.requires_grad} if settings.lora else set(),
        }
        layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        made: dict[int, nn.Parameter] = {}
        names = {id(p): name for name, p in model.named_parameters()}
        for module in [*layers, self._root]:
            if source is not None:
                _fill(module, lambda p: source(names[id(p)]), made)
            fully_shard(module, **options)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply while it sums
        self._model = model

    def run(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._root(function, *args)

    def recover(self) -> None:
        """A forward that raised leaves layers unsharded: their gradients would go to parameters nobody trains."""
        self._root.reset_iter_state()

    def copied(self, model: Any) -> tuple[Any, Source | None]:
        own = dict(self._model.named_parameters())
        return copy.deepcopy(self._blank), lambda name: full(own[name].detach())


class _Root(nn.Module):
    """Calls a function within its own forward, where FSDP holds the weights that no layer owns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def shard(model: Any, settings: PolicySettings, ranks: Ranks, source: Source | None = None) -> Whole:
    """Spread a model over the ranks as `settings.shard` says; call it before the optimizer is made."""
    if ranks.mesh is not None and settings.shard == "full":
        return Sharded(model, settings, ranks, source)
    if source is not None:
        names = {id(p): name for name, p in model.named_parameters()}
        _fill(model, lambda p: source(names[id(p)]), {})
    return Whole(ranks) if ranks.size > 1 else WHOLE


def _blank(model: Any) -> Any:
    """The model's structure with its buffers, and parameters without values: FSDP refuses to copy what it shards."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _fill(module: nn.Module, value: Callable[[nn.Parameter], Tensor], made: dict[int, nn.Parameter]) -> None:
    """Give the parameters of a module that are on the meta device their values; tied ones stay tied.

    Args:
        made: those that have been made already, by the id of what they replace.
    """
    for owner in module.modules():
        for leaf, p in owner.named_parameters(recurse=False):
            if p.is_meta:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(value(p).to(p.dtype), p.requires_grad)
                setattr(owner, leaf, made[id(p)])


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory: rows of it if it is sharded, else all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank has other rows of this tensor."""
    return isinstance(tensor, DTensor)


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A copy of a whole tensor, sharded as the parameter is if it has its shape."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.shape == parameter.shape:
        return distribute_tensor(
            value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
        ).clone()
    return value.detach().clone().to(parameter.device)


def whole(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Tensors by name without gradient, whole on every rank; views where nothing is sharded."""
    if any(isinstance(value, DTensor) for value in tensors.values()):
        return Gathered(tensors)
    return {name: value.detach() for name, value in tensors.items()}


class Gathered(Mapping[str, Tensor]):
    """Tensors by name, each made whole when it is read; every rank must read the same ones in the same order.

    Tied entries that are held at the same time are the same tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._held: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def __getitem__(self, name: str) -> Tensor:
        value = self._tensors[name]
        if not isinstance(value, DTensor):
            return value.detach()
        found = self._held.get(id(value))
        if found is None:
            with torch.inference_mode(False):  # engines read weights in inference mode, which DTensor cannot
                found = self._held[id(value)] = full(value.detach())
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
