"""Next tokens from logits: inverse-CDF sampling, and the log-prob of what was drawn."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def draw(
    logits: Float[Tensor, "R V"], uniform: Float[Tensor, " R"], temperature: float, top_k: int, top_p: float
) -> tuple[Int[Tensor, " R"], Float[Tensor, " R"]]:
    """Draw a token per row: the first whose cumulated probability exceeds the row's uniform number.

    Args:
        uniform: in [0, 1); unused at temperature 0.
    Returns:
        Tokens and their log-probs, under the distribution they were drawn from (tempered, truncated by top_k, then by
        top_p). At temperature 0 the most likely token, with its log-prob at temperature 1, where top_p and top_k do
        not apply.
    """
    logits = logits.float()
    if temperature == 0:
        logprobs = torch.log_softmax(logits, -1)
        tokens = logprobs.argmax(-1)
    else:
        logprobs = torch.log_softmax(truncate(logits / temperature, top_k, top_p), -1)
        cdf = logprobs.exp().cumsum_(-1)
        targets = uniform[:, None] * cdf[:, -1:]
        # NaN logits give an index of V: keep it in range, the caller reports the NaN log-prob.
        tokens = torch.searchsorted(cdf, targets, right=True)[:, 0].clamp_max_(logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def truncate(logits: Float[Tensor, "R V"], top_k: int, top_p: float) -> Float[Tensor, "R V"]:
    """-inf outside the `top_k` most likely tokens, then outside the fewest of them that hold `top_p` of the mass.

    The most likely token always stays; top_k = 0 and top_p = 1 switch the two off.
    """
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        beyond = before >= top_p
        beyond[:, 0] = False
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits
