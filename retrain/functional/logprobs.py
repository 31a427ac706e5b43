"""Log-probabilities of sampled tokens. The only module that shifts logits against tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

FLOOR = -1e4
"""Least log-prob: keeps a forbidden token (logit -inf) finite; exp(FLOOR) is 0 in every float type."""

_CACHED = 1 << 18
"""Logits of one block: a megabyte in float32, half of a core's second cache."""
_FILLING = 1 << 24
"""The same on other devices: enough for all their cores, and 64 MB to work in."""


@dataclass(frozen=True)
class TokenScores:
    """Statistics of n tokens from one pass over the logits, in nats.

    Attributes:
        logprobs: [n] log p(token), <= 0.
        entropy: [n] H = -sum_v p_v ln p_v of the distribution the token was drawn from, in [0, ln V].
        varentropy: [n] sum_v p_v (ln p_v)^2 - H^2, variance of the surprisal, >= 0; never with gradient.
        sum_pi_squared: [n] sum_v p_v^2 in (0, 1], without gradient; zeros unless requested.
    """

    logprobs: Tensor
    entropy: Tensor
    varentropy: Tensor
    sum_pi_squared: Tensor


def predictors(scored: Bool[Tensor, "N T"]) -> Int[Tensor, " n"]:
    """Cell, among the N*T, whose distribution each scored token was drawn from: the one before it in its row.

    Args:
        scored: tokens whose log-prob is wanted; never a row's first.
    """
    assert not bool(scored[:, 0].any()), "the first token of a row has nothing before it to be predicted from"
    return scored.reshape(-1).nonzero()[:, 0] - 1


def token_scores(
    hidden: Float[Tensor, "n d"],
    head: Callable[[Tensor], Tensor],
    tokens: Int[Tensor, " n"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    squares: bool = False,
) -> TokenScores:
    """Score tokens under softmax(head(hidden) / temperature), in float32, a chunk of positions at a time.

    lp = z_token - ln sum_v exp z_v,  z = head(hidden) / temperature

    No more than `chunk` rows of logits exist at once: with several chunks the backward pass computes each
    chunk's logits again.

    Args:
        hidden: last hidden state at the position that predicts each token (see `predictors`).
        head: hidden state -> logits [*, V].
        tokens: the token at each position.
        temperature: of sampling, > 0.
        chunk: positions at a time, >= 1.
        squares: compute `sum_pi_squared`, which costs one more pass over the probabilities.
    """

    def score(part: Tensor, targets: Tensor) -> Any:
        return _Scores.apply(head(part), targets, temperature, squares)

    if len(tokens) <= chunk:
        return TokenScores(*score(hidden, tokens))
    parts = [
        checkpoint(score, part, targets, use_reentrant=False, preserve_rng_state=False)
        for part, targets in zip(hidden.split(chunk), tokens.split(chunk), strict=True)
    ]
    return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


class _Scores(torch.autograd.Function):
    """(lp, H, varentropy, sum p^2) of logits; saves the logits themselves and writes the gradient in closed form.

    d lp / dz_v = [v = token] - p_v        d H / dz_v = -p_v (ln p_v + H)

    A CPU works on a few rows at a time, which stay in its cache between operations. So the backward
    pass recomputes the logarithms: a second [n, V] table in float32 would cost more.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, squares: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        logprobs, entropy, varentropy, collision = logits.new_zeros(4, len(logits), dtype=wide)
        for rows, work in _blocks(logits, wide):
            logs = _logs(logits[rows], temperature, work)
            logprobs[rows] = logs.gather(-1, tokens[rows, None])[:, 0]
            p = torch.exp(logs, out=work)
            if squares:
                collision[rows] = torch.linalg.vecdot(p, p)
            weighted = p.mul_(logs)
            entropy[rows] = -weighted.sum(-1)
            varentropy[rows] = (torch.linalg.vecdot(weighted, logs) - entropy[rows].square()).clamp_min_(0)
        ctx.save_for_backward(logits, tokens, entropy)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(varentropy, collision)
        ctx.set_materialize_grads(False)
        return logprobs, entropy, varentropy, collision

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        of_logprob, of_entropy = grads[:2]
        logits, tokens, entropy = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows, work in _blocks(logits, entropy.dtype):
            logs = _logs(logits[rows], ctx.temperature, work)
            out = torch.exp(logs, out=work)
            if of_entropy is None:
                assert of_logprob is not None
                out.mul_(-of_logprob[rows, None])
            else:
                slope = logs.add_(entropy[rows, None]).mul_(-of_entropy[rows, None])
                out.mul_(slope if of_logprob is None else slope.sub_(of_logprob[rows, None]))
            if of_logprob is not None:
                out.scatter_add_(-1, tokens[rows, None], of_logprob[rows, None])
            gradient[rows] = out.div_(ctx.temperature)
        return gradient, None, None, None


def _logs(logits: Tensor, temperature: float, work: Tensor) -> Tensor:
    """ln p of some rows; `work` has their shape and the type of the result."""
    return torch.log_softmax(work.copy_(logits).div_(temperature), -1).clamp_min_(FLOOR)


def _blocks(logits: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows of the logits with scratch memory of their size, which all blocks share."""
    count = max(1, (_CACHED if logits.device.type == "cpu" else _FILLING) // max(1, logits.shape[-1]))
    work = torch.empty_like(logits[:count], dtype=dtype)
    for first in range(0, len(logits), count):
        rows = slice(first, first + count)
        yield rows, work[: len(logits[rows])]
