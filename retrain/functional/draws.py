"""Sample next tokens from logits by inverse-CDF sampling, with their log-probs."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def draw(
    logits: Float[Tensor, "R V"], uniform: Float[Tensor, " R"], temperature: float, top_k: int, top_p: float
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """Draw a token for each row: the first token whose cumulative probability exceeds the row's uniform number.

    Args:
        logits: [R, V] logits of the next token.
        uniform: [R] uniform random numbers in [0, 1); unused at temperature 0.
        temperature: sampling temperature, >= 0.
        top_k: number of most likely tokens to keep; 0 keeps all.
        top_p: probability mass to keep; 1 keeps all.
    Returns:
        [R] tokens, and [R] their log-probs under the distribution from which they were drawn (divided by the
        temperature, truncated by top_k, then by top_p). At temperature 0: the most likely token, and its log-prob at
        temperature 1 without truncation.
    """
    logits = logits.float()
    if temperature == 0:
        logprobs = torch.log_softmax(logits, -1)
        tokens = logprobs.argmax(-1)
    else:
        logprobs = torch.log_softmax(truncate(logits / temperature, top_k, top_p), -1)
        cdf = logprobs.exp().cumsum_(-1)
        # Rounding leaves the last sum near 1; scaled by it, a draw never lies beyond the last possible token.
        targets = uniform[:, None] * cdf[:, -1:]
        # `right`, so that a draw of 0 skips leading tokens of probability 0.
        # NaN logits give the index V, which is clamped to a valid index; the caller reports the NaN log-prob.
        tokens = torch.searchsorted(cdf, targets, right=True)[:, 0].clamp_max_(logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def truncate(logits: Float[Tensor, "R V"], top_k: int, top_p: float) -> Float[Tensor, "R V"]:
    """Top-k, then nucleus (top-p) truncation: set the logits of all other tokens to -inf.

    The nucleus is the smallest set of most likely tokens whose probability is at least `top_p`, after the top-k
    truncation. The most likely token is always kept. Tokens with the same logit as the last of the `top_k` are kept.

    Args:
        logits: [R, V] logits, already divided by the temperature.
        top_k: number of most likely tokens to keep; 0 keeps all.
        top_p: probability to keep, in (0, 1]; 1 keeps all.
    """
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        # Probability of all tokens before each one. `roll` puts the total before the first, which is always kept.
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        beyond = before >= top_p
        beyond[:, 0] = False
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits
