"""Token scores on GPUs: torch.compile fuses the forward and the backward pass into a few passes over the logits.

One operation after the other reads and writes [n, V] numbers in float32 dozens of times, which took a third of the
time of an update of Qwen3-0.6B on an H100 (dev/log.md).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from retrain.functional.logprobs import FLOOR, ScoreTensors, operation_by_operation

_PROBED_ROWS = 256
"""Rows of the first logits on which compiling is tried."""


def fused(logits: Tensor, tokens: Tensor, temperature: float, squares: bool) -> ScoreTensors:
    """Compute the columns of `TokenScores` from logits, compiled if possible; a `Scorer`.

    The first call for a dtype compiles, which takes seconds. The compiler needs Triton and a C compiler; a failure is
    reported once.
    """
    if can_fuse(logits, tokens):
        return FusedScores.apply(logits, tokens, temperature, squares)  # pyright: ignore[reportReturnType]
    return operation_by_operation(logits, tokens, temperature, squares)


class FusedScores(torch.autograd.Function):
    """Compute (lp, H, varentropy, sum p^2) from logits, as `token_scores` does.

    d lp / dz_v = [v = token] - p_v        d H / dz_v = -p_v (ln p_v + H)
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, squares: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        *columns, normalizer = _compiled(scores)(logits.detach(), tokens, temperature, squares)
        ctx.save_for_backward(logits, tokens, normalizer, columns[1])
        ctx.temperature = temperature
        ctx.mark_non_differentiable(*columns[2:])
        ctx.set_materialize_grads(False)
        return tuple(columns)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        logits, tokens, normalizer, entropy = ctx.saved_tensors
        # One compiled function for all cases: a missing gradient is 0.
        slopes = [torch.zeros_like(entropy) if grad is None else grad for grad in grads[:2]]
        return _compiled(gradient)(logits, tokens, ctx.temperature, normalizer, entropy, *slopes), None, None, None


def scores(
    logits: Tensor, tokens: Tensor, temperature: float, squares: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the four results of `TokenScores` and the normalizer ln sum_v exp z_v, each [n].

    The dtype is float32, or that of the logits if it is wider.

    Args:
        logits: [n, V]; z = logits / temperature.
        tokens: [n].
        temperature: sampling temperature, > 0.
        squares: compute sum p^2; zeros otherwise.
    """
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    normalizer = torch.logsumexp(z, -1)
    # Clamped, because a forbidden token has p = 0 and ln p = -inf, whose product is NaN.
    logs = (z - normalizer[:, None]).clamp_min(FLOOR)
    p = logs.exp()
    entropy = -(p * logs).sum(-1)
    varentropy = ((p * logs * logs).sum(-1) - entropy.square()).clamp_min(0)
    collision = p.square().sum(-1) if squares else torch.zeros_like(entropy)
    chosen = logits.gather(-1, tokens[:, None])[:, 0].to(z.dtype) / temperature
    return (chosen - normalizer).clamp_min(FLOOR), entropy, varentropy, collision, normalizer


def gradient(  # noqa: PLR0913 - five columns, the logits and a key
    logits: Tensor,
    tokens: Tensor,
    temperature: float,
    normalizer: Tensor,
    entropy: Tensor,
    logprob_grad: Tensor,
    entropy_grad: Tensor,
) -> Tensor:
    """Return dL/dlogits [n, V] in the dtype of the logits.

    dL/dz_v = g ([v = token] - p_v) - h p_v (ln p_v + H),  z = logits / temperature

    Args:
        logits, tokens, temperature: as for `scores`.
        normalizer, entropy: [n] results of `scores`.
        logprob_grad, entropy_grad: [n] g = dL/dlp and h = dL/dH.
    """
    z = logits.to(normalizer.dtype) / temperature
    logs = (z - normalizer[:, None]).clamp_min(FLOOR)
    slope = entropy_grad[:, None] * (logs + entropy[:, None]) + logprob_grad[:, None]
    is_token = torch.arange(logits.shape[-1], device=logits.device) == tokens[:, None]
    of_z = torch.where(is_token, logprob_grad[:, None], 0) - logs.exp() * slope
    return (of_z / temperature).to(logits.dtype)


def reason(problem: Exception) -> str:
    """Return the beginning of a compiler's error, which may be pages long."""
    return " ".join(f"{type(problem).__name__}: {problem}".split())[:300]


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # The number of tokens differs from call to call; with static shapes each would compile again.
    return torch.compile(function, dynamic=True)


_failed: list[str] = []
"""Error of a compilation, after which no further one is tried."""
_compiles: set[torch.dtype] = set()
"""Dtypes of logits for which both functions were compiled."""


def can_fuse(logits: Tensor, tokens: Tensor) -> bool:
    """Return whether both functions compile for logits [n, V] of this dtype."""
    if logits.dtype not in _compiles and not _failed:
        logits, tokens = logits.detach()[:_PROBED_ROWS], tokens[:_PROBED_ROWS]
        try:
            _, entropy, _, zeros, normalizer = _compiled(scores)(logits, tokens, 1.0, False)
            _compiled(gradient)(logits, tokens, 1.0, normalizer, entropy, zeros, zeros)
            _compiles.add(logits.dtype)
        # Memory would be short without the compiler, too, so this does not speak against it.
        except torch.OutOfMemoryError:
            raise
        except Exception as problem:  # a compiler may raise anything; the operations run one after the other then
            _failed.append(reason(problem))
            text = "log-probs are computed operation by operation, which is slower: torch.compile failed (%s)"
            logging.getLogger(__name__).warning(text, _failed[0])
    return not _failed
