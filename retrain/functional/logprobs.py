"""Log-probabilities of sampled tokens. This is the only module that shifts logits relative to tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

FLOOR = -1e4
"""Lower bound of log-probs, so that a forbidden token (logit -inf) has a finite one. exp(FLOOR) is 0 in every dtype."""

_CPU_BLOCK = 1 << 18
"""Number of logits in one block on a CPU: 1 MB in float32, half of a core's L2 cache."""
_DEVICE_BLOCK = 1 << 24
"""Number of logits in one block on other devices: 64 MB in float32, enough work for all cores of the device."""


@dataclass(frozen=True)
class TokenScores:
    """Statistics of n tokens and their distributions, in nats.

    Attributes:
        logprobs: [n] log p(token), <= 0.
        entropy: [n] H = -sum_v p_v ln p_v of the distribution from which the token was drawn, in [0, ln V].
        varentropy: [n] sum_v p_v (ln p_v)^2 - H^2, the variance of the surprisal, >= 0; without gradient.
        sum_pi_squared: [n] sum_v p_v^2 in (0, 1], without gradient; zeros unless requested.
    """

    logprobs: Tensor
    entropy: Tensor
    varentropy: Tensor
    sum_pi_squared: Tensor


def predictors(scored: Bool[Tensor, "N T"]) -> Int[Tensor, " n"]:
    """Return the index, among the N*T positions, that predicts each scored token: that of the token before it.

    Args:
        scored: [N, T] tokens to score; the first token of a row must not be among them.
    """
    assert not bool(scored[:, 0].any()), "the first token of a row cannot be scored, because no token is before it"
    return scored.reshape(-1).nonzero()[:, 0] - 1


def token_scores(  # noqa: PLR0913 - three inputs and four keys
    hidden: Float[Tensor, "n d"],
    head: Callable[[Tensor], Tensor],
    tokens: Int[Tensor, " n"],
    *,
    temperature: float = 1.0,
    chunk: int = 1024,
    squares: bool = False,
    scorer: Scorer | None = None,
) -> TokenScores:
    """Score tokens under softmax(head(hidden) / temperature), in float32, a chunk of positions at a time.

    lp = z_token - ln sum_v exp z_v,  z = head(hidden) / temperature

    At most `chunk` rows of logits are in memory at once. If there are several chunks, the backward pass computes the
    logits of each chunk again.

    Args:
        hidden: [n, d] last hidden states at the positions that predict the tokens (see `predictors`).
        head: function from hidden states to logits [*, V].
        tokens: [n] tokens to score.
        temperature: sampling temperature, > 0.
        chunk: number of positions at a time, >= 1.
        squares: compute `sum_pi_squared`, which costs one more pass over the probabilities.
        scorer: computes the scores from logits; None: operation by operation.
    """

    compute = scorer or operation_by_operation

    def score(states: Tensor, targets: Tensor) -> Any:
        return compute(head(states), targets, temperature, squares)

    if len(tokens) <= chunk:
        return TokenScores(*score(hidden, tokens))
    # Scoring draws no random numbers, so the backward pass need not restore the generators' states.
    chunks = [
        checkpoint(score, states, targets, use_reentrant=False, preserve_rng_state=False)
        for states, targets in zip(hidden.split(chunk), tokens.split(chunk), strict=True)
    ]
    return TokenScores(*(torch.cat(column) for column in zip(*chunks, strict=True)))


ScoreTensors = tuple[Tensor, Tensor, Tensor, Tensor]
"""The columns of `TokenScores`."""
Scorer = Callable[[Tensor, Tensor, float, bool], ScoreTensors]
"""(logits [n, V], tokens [n], temperature, squares) -> columns."""


def operation_by_operation(logits: Tensor, tokens: Tensor, temperature: float, squares: bool) -> ScoreTensors:
    """Compute the columns of `TokenScores` from logits, in blocks of rows."""
    return _Scores.apply(logits, tokens, temperature, squares)  # pyright: ignore[reportReturnType]


class _Scores(torch.autograd.Function):
    """Compute (lp, H, varentropy, sum p^2) from logits. It saves only the logits; the gradient has a closed form:

    d lp / dz_v = [v = token] - p_v        d H / dz_v = -p_v (ln p_v + H)

    A CPU processes a few rows at a time, which stay in its cache between operations. The backward pass computes
    the logarithms again, which costs less than storing a second [n, V] tensor in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, squares: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # At least float32: bfloat16 has 8 bits, too few for a sum over a vocabulary.
        wide = torch.promote_types(logits.dtype, torch.float32)
        logprobs, entropy, varentropy, collision = logits.new_zeros(4, len(logits), dtype=wide)
        for rows, work in _blocks(logits, wide):
            logs = _logs(logits[rows], temperature, work)
            logprobs[rows] = logs.gather(-1, tokens[rows, None])[:, 0]
            # `log_softmax` has written to new memory, so `work` is free for the probabilities.
            p = torch.exp(logs, out=work)
            if squares:
                collision[rows] = torch.linalg.vecdot(p, p)
            weighted = p.mul_(logs)
            entropy[rows] = -weighted.sum(-1)
            # The difference of two nearly equal numbers may be slightly negative.
            varentropy[rows] = (torch.linalg.vecdot(weighted, logs) - entropy[rows].square()).clamp_min_(0)
        ctx.save_for_backward(logits, tokens, entropy)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(varentropy, collision)
        # An unused output then has the gradient None instead of zeros, which saves passes in `backward`.
        ctx.set_materialize_grads(False)
        return logprobs, entropy, varentropy, collision

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        logprob_grad, entropy_grad = grads[:2]
        logits, tokens, entropy = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        for rows, work in _blocks(logits, entropy.dtype):
            logs = _logs(logits[rows], ctx.temperature, work)
            out = torch.exp(logs, out=work)
            # The usual case, a loss without an entropy term, needs two passes less.
            if entropy_grad is None:
                assert logprob_grad is not None
                out.mul_(-logprob_grad[rows, None])
            else:
                slope = logs.add_(entropy[rows, None]).mul_(-entropy_grad[rows, None])
                out.mul_(slope if logprob_grad is None else slope.sub_(logprob_grad[rows, None]))
            if logprob_grad is not None:
                out.scatter_add_(-1, tokens[rows, None], logprob_grad[rows, None])
            gradient[rows] = out.div_(ctx.temperature)
        return gradient, None, None, None


def _logs(logits: Tensor, temperature: float, work: Tensor) -> Tensor:
    """Return the log-probs of all tokens for some rows of logits.

    Args:
        logits: the rows.
        temperature: sampling temperature.
        work: scratch memory of the same shape, with the dtype of the result.
    """
    # Clamped before anything multiplies it by p: 0 * -inf is NaN.
    return torch.log_softmax(work.copy_(logits).div_(temperature), -1).clamp_min_(FLOOR)


def _blocks(logits: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of rows of the logits, each with scratch memory of its size. All blocks share the memory."""
    count = max(1, (_CPU_BLOCK if logits.device.type == "cpu" else _DEVICE_BLOCK) // max(1, logits.shape[-1]))
    work = torch.empty_like(logits[:count], dtype=dtype)
    for first in range(0, len(logits), count):
        rows = slice(first, first + count)
        yield rows, work[: len(logits[rows])]
