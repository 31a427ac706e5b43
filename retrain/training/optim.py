"""Optimizers over named parameters, their learning rate schedule, and their state as plain tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrain.system.extras import library
from retrain.training.distributed.sharded_tensors import like, local
from retrain.training.settings import PolicySettings
from retrain.types import State

_SAMPLED = 64
"""Number of weights of every tensor by which a change is noticed."""
VALUE_HEAD = "value_head."
"""Prefix of the names of a value head's parameters, which are not parameters of the model."""


def lr_factor(step: int, settings: PolicySettings) -> float:
    """Learning rate at optimizer step `step` (from 0), as a fraction of the peak, in [0, 1].

    warm-up   (step + 1) / warmup_steps, for step < warmup_steps
    constant  1
    linear    1 - u
    cosine    (1 + cos(pi u)) / 2

    u = (step - warmup_steps) / (total_steps - warmup_steps), at most 1. The last step of a run is total_steps - 1, so
    its factor is still above 0.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return 1.0
    # Beyond total_steps a cosine would rise again.
    done = min(1.0, (step - settings.warmup_steps) / max(1, settings.total_steps - settings.warmup_steps))
    return 1 - done if settings.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2


class Optimizer:
    """The optimizer that `settings.optimizer` names, over the trained parameters of a model.

    "adamw" is AdamW. "muon" is Muon for hidden matrices and AdamW for embeddings, head, norms and biases; Muon's
    updates are rescaled to the root mean square of AdamW's, so both use one learning rate. "adamw8bit" is AdamW whose
    moments take one byte each, with a scale per block of 256 weights; parameters of fewer than 4,096 weights keep
    float32 moments. Weight decay applies to parameters of two or more dimensions.

    Attributes:
        parameters: the trained parameters by name.

    References: Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101; Jordan et al., Muon,
        2024; Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861 (bitsandbytes).
    """

    def __init__(self, model: nn.Module, settings: PolicySettings, head: nn.Module | None = None) -> None:
        """Collect the parameters of a model, and of a value head if there is one, that require a gradient."""
        self.settings = settings
        named = [*model.named_parameters()]
        named += [] if head is None else [(f"{VALUE_HEAD}{name}", p) for name, p in head.named_parameters()]
        self.parameters = {name: p for name, p in named if p.requires_grad}
        self._names: dict[Tensor, str] = {p: name for name, p in self.parameters.items()}
        # Without Muon all are excluded from it.
        excluded = _embeddings_and_head(model) if settings.optimizer == "muon" else self._names.keys()
        muon = [p for p in self._names if p.ndim == 2 and p not in excluded]
        rest = [p for p in self._names if p.ndim != 2 or p in excluded]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        common: dict[str, Any] = {"lr": settings.lr, "betas": settings.betas, "eps": settings.eps}
        if settings.optimizer == "adamw8bit":
            adamw = library("bitsandbytes.optim", "8bit").AdamW8bit(groups, **common)
        else:
            # The fused kernel updates all parameters in one call; it exists for these two devices.
            adamw = torch.optim.AdamW(groups, **common, fused=all(p.device.type in ("cpu", "cuda") for p in rest))
        self.optimizers: list[torch.optim.Optimizer] = [adamw]
        if muon:
            self.optimizers.append(
                torch.optim.Muon(
                    muon, lr=settings.lr, weight_decay=settings.weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )

    def step(self, step: int) -> float:
        """Take optimizer step number `step` (from 0) with the parameters' gradients; return its learning rate."""
        lr = self.settings.lr * lr_factor(step, self.settings)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            self._one_by_one(optimizer) if self.settings.offload == "optimizer" else optimizer.step()
        return lr

    def sampled(self) -> tuple[Tensor, Tensor]:
        """Return up to 64 evenly spaced entries of every trained tensor's part on this rank, and their gradients."""
        empty = torch.empty(0)
        weights = [_spaced(local(p.detach())) for p in self.parameters.values()]
        gradients = [_spaced(local(p.grad)) for p in self.parameters.values() if p.grad is not None]
        return torch.cat(weights or [empty]), torch.cat(gradients or [empty])

    def zero_grad(self) -> None:
        """Set the gradients of the trained parameters to None."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def _one_by_one(self, optimizer: torch.optim.Optimizer) -> None:
        """Update one parameter at a time; the moments of all other parameters stay in CPU memory."""
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        # Empty groups: the optimizer then sees, and steps, a single parameter at a time.
        for group, _ in groups:
            group["params"] = []
        for group, parameters in groups:
            for p in parameters:
                group["params"] = [p]
                optimizer.state[p] = _moved(optimizer.state[p], p.device)
                optimizer.step()
                optimizer.state[p] = _moved(optimizer.state[p], torch.device("cpu"))
            group["params"] = []
        for group, parameters in groups:
            group["params"] = parameters

    def state_dict(self) -> State:
        """Return {parameter name: {"exp_avg": tensor, ...}}; the tensors are not copies."""
        states = [(p, state) for o in self.optimizers for p, state in o.state.items()]
        return {self._names[p]: {key: torch.as_tensor(value) for key, value in state.items()} for p, state in states}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Restore the state that `state_dict` returned; the tensors are copied."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
            for p in [p for group in optimizer.param_groups for p in group["params"] if self._names[p] in state]:
                # By name, because torch's own load_state_dict matches parameters by their position.
                copied: dict[str, Any] = {key: like(value, p) for key, value in state[self._names[p]].items()}
                if self.settings.optimizer == "adamw8bit":
                    copied["step"] = int(copied["step"])  # bitsandbytes counts in Python
                optimizer.state[p] = copied


def _spaced(tensor: Tensor) -> Tensor:
    # A stride that is rounded down gives a few more; the slice cuts them off.
    return tensor.reshape(-1)[:: max(1, tensor.numel() // _SAMPLED)][:_SAMPLED].float()


def _moved(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in state.items()}


def _embeddings_and_head(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of embeddings and of the output head, for which Muon is not intended."""
    modules: list[Any] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return {p for module in [*modules, head] if module is not None for p in module.parameters()}
