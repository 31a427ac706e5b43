"""Uncertainty of the policy at each sampled token. The last two need a scoring forward pass of the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain import functional as F
from retrain.registry import uncertainty

if TYPE_CHECKING:
    from torch import Tensor

_SURPRISAL_LIMIT = 50.0
"""Nats. A log-prob may be as low as -1e4 (`FLOOR`), and one such token would outweigh its whole sequence."""


@uncertainty("surprisal")
def surprisal(sampler_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Surprisal of the sampled token.

    h_t = min(-log p_t, 50)

    Args:
        sampler_logprobs: [N, T]; response_mask: [N, T] bool.
    Returns:
        [N, T] nats in [0, 50], 0 outside response_mask.
    """
    return (-F.masked.keep(sampler_logprobs, response_mask)).clamp(max=_SURPRISAL_LIMIT)


@uncertainty("predictive_variance")
def predictive_variance(sampler_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Variance of the event that the sampled token is drawn.

    h_t = p_t * (1 - p_t), with p_t the probability of the sampled token

    Args:
        sampler_logprobs: [N, T]; response_mask: [N, T] bool.
    Returns:
        [N, T] in [0, 1/4], 0 outside response_mask.
    """
    p = F.masked.keep(sampler_logprobs, response_mask).exp()
    return p * (1 - p)


@uncertainty("shannon_entropy")
def shannon_entropy(entropy: Tensor) -> Tensor:
    """Entropy of the policy's distribution over the vocabulary.

    h_t = -sum_v p_v log p_v

    Args:
        entropy: [N, T], of the trainer's policy.
    Returns:
        [N, T] nats, at least 0.
    """
    return entropy


@uncertainty("varentropy")
def varentropy(varentropy: Tensor) -> Tensor:
    """Variance of the surprisal over the vocabulary.

    h_t = sum_v p_v (log p_v)^2 - (sum_v p_v log p_v)^2

    Args:
        varentropy: [N, T], of the trainer's policy.
    Returns:
        [N, T] in squared nats, at least 0.
    """
    return varentropy
