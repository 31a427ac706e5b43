"""Everything that makes updates fast on CPUs: fewer operations in a model's modules, and the memory that they reuse.

Except for matrix products, an update is mostly elementwise, and its time is that of the memory it moves. The results
stay the same, so a reader of the policy can leave this module out. The figures are in docs/performance.md.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_EPSILON = 1e-3
"""Of the norm that decides whether a class computes what is expected: large enough to be seen."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of glibc's parameters for `mallopt`."""


def keep_freed_memory() -> None:
    """Let the C library keep what is freed for what is asked for next, up to the most that was ever in use.

    By default glibc returns large blocks to the system, which clears every page of them when they come back: up to a
    quarter of an update of a small model. Elsewhere the function does nothing.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
        library.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


@contextmanager
def unscanned_heap() -> Generator[None]:
    """Leave all objects that exist out of garbage collections inside the block.

    A full collection visits every object of torch, transformers and the run. The tasks and futures of rollouts trigger
    one every few steps: a fifth of the CPU time of the quickstart's rollouts (docs/log.md). What is made inside the
    block is collected as usual. A process that has frozen objects itself keeps its choice.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def shorten(model: nn.Module) -> None:
    """Let a model on a processor norm with `RmsNorm`, and any model cast for all linear layers at once.

    Its parameters, their names and what it computes stay as they are, but for weights of 16 bits: under autocast
    their residual stream is float32, as that of float32 weights is, unless the model has layer norms. A copy of the
    model has the same. Calling it again changes nothing.
    """
    modules = list(model.modules())
    # One for the whole model, also for adapters that are added later: layers that share a cast add their gradients in
    # its type, so that a model that was warmed up before and one that was loaded would differ in rounding.
    cast = next((vars(one)["shared_cast"] for one in modules if "shared_cast" in vars(one)), SharedCast())
    wide = not any(isinstance(one, nn.LayerNorm) for one in modules)  # those refuse an input wider than their gain
    for module in modules:
        kind = type(module)
        if isinstance(module, nn.Embedding) and wide and "widened" not in vars(module):
            vars(module)["widened"] = True
            module.register_forward_hook(_widened)
        if kind is nn.Linear:  # quantized layers are of other classes, and cast by themselves
            if "shared_cast" not in vars(module):
                vars(module)["shared_cast"] = cast
                module.register_forward_pre_hook(cast)
        elif kind.__name__.endswith("RMSNorm") and _is_rms_norm(kind):
            module.forward = MethodType(_normed, module)


@cache
def _is_rms_norm(kind: type[Any]) -> bool:
    """Whether modules of this class give x / sqrt(mean(x^2) + eps) * gain, found by trying."""
    try:
        with torch.device("cpu"), torch.no_grad():
            norm = kind(4, eps=_EPSILON)
            norm.weight.copy_(torch.tensor([0.5, 1.0, -2.0, 3.0]))
            x = torch.tensor([[0.1, -0.2, 0.3, 0.05], [3.0, 1.0, -1.0, 2.0]])
            rounded = x.bfloat16()
            torch.testing.assert_close(_normed(norm, x), norm(x))
            torch.testing.assert_close(_normed(norm, rounded), norm(rounded), rtol=0.02, atol=0)  # and of the same type
            return True
    except Exception:  # a class that cannot be made or asked like this is left alone
        return False


def _normed(self: Any, hidden: Tensor) -> Tensor:
    if hidden.device.type != "cpu":
        return type(self).forward(self, hidden)
    return RmsNorm.apply(hidden, self.weight, self.variance_epsilon)  # pyright: ignore[reportReturnType]


class RmsNorm(torch.autograd.Function):
    """y = x r gain with r = 1 / sqrt(mean(x^2) + eps), over the last dimension d, as one node of the graph.

    With g the gradient of y: that of x is r (g gain) - x r^3 sum(g gain x) / d, that of gain the sum of g x r over
    all rows. Computed in float32; x of any shape [..., d] and type, gain [d]; y has the type that x gain has.

    Source: B. Zhang and R. Sennrich, Root Mean Square Layer Normalization, 2019 (arXiv:1910.07467).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """y, and x, gain and r for the gradient."""
        wide = x.float()
        r = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, r)
        return (wide * r).mul_(gain).to(torch.result_type(x, gain))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Gradients of x and gain."""
        x, gain, r = ctx.saved_tensors
        wide, grad, size = x.float(), grad.float(), x.shape[-1]
        moved = grad * wide
        of_gain = (r.flatten() @ moved.reshape(-1, size)).to(gain.dtype) if ctx.needs_input_grad[1] else None
        along = (moved.reshape(-1, size) @ gain.float()).view_as(r)
        of_x = moved.copy_(grad).mul_(gain).mul_(r).addcmul_(wide, along.mul_(r**3).div_(-size))
        return of_x.to(x.dtype), of_gain, None


def _widened(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """Begin the residual stream in float32: what follows is promoted to it, and linear layers cast what they read."""
    return output.float() if torch.is_autocast_enabled(output.device.type) else None


class SharedCast:
    """A hook before linear layers: under autocast, what several of them read is cast for the first one only.

    Left to itself, autocast casts the input of query, key and value three times, and keeps three copies for the
    gradient.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._cast: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCast:
        return memo.setdefault(id(self), SharedCast())

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor] | None:
        """The cast input; None leaves it to autocast."""
        x: Any = inputs[0]
        kind = x.device.type
        if not x.requires_grad or x.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
            return None
        if self._source is None or self._source() is not x or self._version != x._version:
            self._source, self._version = weakref.ref(x, self._forget), x._version
            self._cast = x.to(torch.get_autocast_dtype(kind))
        return (self._cast,)

    def _forget(self, source: weakref.ref[Tensor]) -> None:
        if self._source is source:
            self._cast = None
