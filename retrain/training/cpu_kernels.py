"""Speed-ups for CPUs: fewer elementwise operations in a model's modules, and reuse of freed memory.

Apart from its matrix products, an update consists of elementwise operations, whose time is limited by memory
bandwidth. The results stay the same, so a reader of the policy can skip this module. docs/performance.md has the
measurements.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_EPSILON = 1e-3
"""Epsilon of the trial norm in `_is_rms_norm`: large enough to change the result visibly."""

_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
"""The C library."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _LARGEST_KEPT = -1, -3, 1 << 25
"""glibc's parameter numbers for `mallopt`; bytes of the largest block that is kept, the most that glibc keeps by
itself."""


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks of up to 32 MB for later allocations.

    By default glibc returns large blocks to the system, which clears every page when it is allocated again. That takes
    up to a quarter of the time of a small model's update. Larger blocks are returned: a freed block has no room for an
    aligned one of its size (glibc before 2.38), so a run on SmolLM2 held 113 MB more after most steps. Without glibc
    the function does nothing.
    """
    if hasattr(_LIBRARY, "mallopt"):
        _LIBRARY.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        _LIBRARY.mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def trim_freed_memory(floor: int) -> int:
    """Return freed memory to the system if the process holds more than twice what it held after the last time.

    Every matrix product of a new shape leaves small blocks of oneDNN between those that are freed, so the holes fit the
    next batch less and less: without this, SmolLM2 held 70 MB more after every step. Without glibc the function does
    nothing.

    Args:
        floor: pages that the process held after the last time; 0 before the first.
    Returns:
        The floor for the next call.
    """
    if hasattr(_LIBRARY, "malloc_trim") and _pages() > 2 * floor:
        _LIBRARY.malloc_trim(0)
        return _pages()
    return floor


def _pages() -> int:
    """Return the number of pages of main memory that the process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1])


@contextmanager
def unscanned_heap() -> Generator[None]:
    """Exclude all existing objects from garbage collection inside the block.

    A full collection visits every object of torch, transformers and the run. The tasks and futures of rollouts trigger
    one every few steps, which took a fifth of the CPU time of the quickstart's rollouts (dev/log.md). Objects created
    inside the block are collected as usual. If the process has frozen objects itself, nothing changes.
    """
    # `unfreeze` below would release the caller's frozen objects, too.
    if gc.get_freeze_count():
        yield
        return
    # Garbage that is frozen would never be freed.
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def shorten(model: nn.Module) -> None:
    """Replace a model's RMS norms on CPUs by `RmsNorm`, and share casts between its linear layers on any device.

    Parameters, their names and results stay the same, with one exception. Under autocast the residual stream of
    16-bit weights becomes float32, as that of float32 weights is, unless the model has layer norms. Copies of the
    model keep the changes. Calling the function again changes nothing.
    """
    modules = list(model.modules())
    # One cast for the whole model, also for adapters that are added later. Layers that share a cast sum their
    # gradients in its dtype: with several casts, a model that was warmed up in this process would round differently
    # from one that was loaded.
    cast = next((vars(module)["shared_cast"] for module in modules if "shared_cast" in vars(module)), SharedCast())
    # LayerNorm refuses an input wider than its weight.
    wide = not any(isinstance(module, nn.LayerNorm) for module in modules)
    for module in modules:
        kind = type(module)
        if isinstance(module, nn.Embedding) and wide and "widened" not in vars(module):
            vars(module)["widened"] = True
            module.register_forward_hook(_widened)
        if kind is nn.Linear:  # quantized layers have other classes and cast their input themselves
            if "shared_cast" not in vars(module):
                vars(module)["shared_cast"] = cast
                module.register_forward_pre_hook(cast)
        elif kind.__name__.endswith("RMSNorm") and _is_rms_norm(kind):
            module.forward = MethodType(_normed, module)


@cache
def _is_rms_norm(kind: type[Any]) -> bool:
    """Test on examples whether modules of this class compute x / sqrt(mean(x^2) + eps) * gain."""
    try:
        with torch.device("cpu"), torch.no_grad():
            norm = kind(4, eps=_EPSILON)
            norm.weight.copy_(torch.tensor([0.5, 1.0, -2.0, 3.0]))
            x = torch.tensor([[0.1, -0.2, 0.3, 0.05], [3.0, 1.0, -1.0, 2.0]])
            rounded = x.bfloat16()
            torch.testing.assert_close(_normed(norm, x), norm(x))
            # `assert_close` also compares the dtypes.
            torch.testing.assert_close(_normed(norm, rounded), norm(rounded), rtol=0.02, atol=0)
            return True
    except Exception:  # a class with another constructor or other attributes keeps its own forward
        return False


def _normed(self: Any, hidden: Tensor) -> Tensor:
    if hidden.device.type != "cpu":
        return type(self).forward(self, hidden)
    return RmsNorm.apply(hidden, self.weight, self.variance_epsilon)  # pyright: ignore[reportReturnType]


class RmsNorm(torch.autograd.Function):
    """RMS norm over the last dimension as a single autograd node.

    y = x r gain, with r = 1 / sqrt(mean(x^2) + eps) over the d entries of the last dimension
    dL/dx = r g gain - x r^3 sum(g gain x) / d, with g = dL/dy
    dL/dgain = sum over all rows of g x r

    All of it is computed in float32. x is [..., d], gain is [d]; y has the dtype of x * gain.

    References: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Return y; save x, gain and r for the gradient."""
        wide = x.float()
        # The norm is one pass over x; a square and a mean would be two and a temporary tensor.
        r = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, gain, r)
        return (wide * r).mul_(gain).to(torch.result_type(x, gain))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of x and gain, and None for eps."""
        x, gain, r = ctx.saved_tensors
        wide, grad, size = x.float(), grad.float(), x.shape[-1]
        # Its memory is reused for the result below.
        moved = grad * wide
        of_gain = (r.flatten() @ moved.reshape(-1, size)).to(gain.dtype) if ctx.needs_input_grad[1] else None
        along = (moved.reshape(-1, size) @ gain.float()).view_as(r)
        of_x = moved.copy_(grad).mul_(gain).mul_(r).addcmul_(wide, along.mul_(r**3).div_(-size))
        return of_x.to(x.dtype), of_gain, None


def _widened(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
    """Under autocast, return the embeddings in float32: sums with them are float32 too, and linear layers cast their
    input.
    """
    return output.float() if torch.is_autocast_enabled(output.device.type) else None


class SharedCast:
    """Forward pre-hook of linear layers: under autocast, layers with the same input share one cast of it.

    Autocast itself would cast the input of query, key and value three times, and keep three copies for the gradient.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0
        self._cast: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedCast:
        # A weak reference cannot be copied; all layers of the copy share one cast again.
        return memo.setdefault(id(self), SharedCast())

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Tensor] | None:
        """Return the cast input, or None to leave the cast to autocast."""
        x: Any = inputs[0]
        kind = x.device.type
        if torch.compiler.is_compiling():  # the compiler shares casts itself
            return None
        if not x.requires_grad or x.dtype != torch.float32 or not torch.is_autocast_enabled(kind):
            return None
        # The version: an input that was changed in place needs another cast.
        if self._source is None or self._source() is not x or self._version != x._version:
            self._source, self._version = weakref.ref(x, self._forget), x._version
            self._cast = x.to(torch.get_autocast_dtype(kind))
        return (self._cast,)

    def _forget(self, source: weakref.ref[Tensor]) -> None:
        # Without the input nobody reuses the cast, and its memory is freed.
        if self._source is source:
            self._cast = None
