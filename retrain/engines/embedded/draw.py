"""Next tokens from logits: inverse-CDF sampling, and the log-prob of what was drawn."""

from __future__ import annotations

import torch
from torch import Tensor

from retrain.functional.seeds import derive_seed
from retrain.types import Sampling


def uniforms(indices: list[int], sampling: Sampling) -> Tensor:
    """One uniform number for every token that could be sampled.

    Every prompt has a stream of its own, so what a row draws depends neither on the rows beside it nor on
    which of them have finished.

    Args:
        indices: [B] positions of the prompts in the call.
    Returns:
        [max_tokens, B * group_size] float32 in [0, 1 - 2^-22]. Strictly below 1 even after a float32 product with
        the sum of the probabilities, so that a token of probability 0 is never reached.
    """
    columns: list[Tensor] = []
    for index in indices:
        generator = torch.Generator().manual_seed(derive_seed(sampling.seed, "prompt", index))
        columns.append(torch.rand(sampling.max_tokens, sampling.group_size, generator=generator))
    return torch.cat(columns, 1).mul_(1 - 2**-22)


def draw(logits: Tensor, uniform: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw a token per row: the first whose cumulated probability exceeds the row's uniform number.

    Args:
        logits: [R, V], any float type.
        uniform: [R] in [0, 1); unused at temperature 0.
    Returns:
        tokens [R] int64 and their log-probs [R] float32, under the distribution they were drawn from (tempered,
        truncated by top_k, then by top_p). At temperature 0 the most likely token, with its log-prob at
        temperature 1, where top_p and top_k do not apply.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        logprobs = torch.log_softmax(logits, -1)
        tokens = logprobs.argmax(-1)
    else:
        logprobs = torch.log_softmax(truncate(logits / sampling.temperature, sampling), -1)
        cdf = logprobs.exp().cumsum_(-1)
        targets = uniform[:, None] * cdf[:, -1:]
        # NaN logits give an index of V: keep it in range, the caller reports the NaN log-prob.
        tokens = torch.searchsorted(cdf, targets, right=True)[:, 0].clamp_max_(logits.shape[-1] - 1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """-inf outside the `top_k` most likely tokens, then outside the fewest of them that hold `top_p` of the mass.

    The most likely token always stays; top_k = 0 and top_p = 1 switch the two off. logits: [R, V].
    """
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1, -1)
        beyond = before >= sampling.top_p
        beyond[:, 0] = False
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits
