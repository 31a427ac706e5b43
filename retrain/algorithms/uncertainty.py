"""Uncertainty of the policy at each sampled token. The last two come from the trainer's own scoring forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain import functional as F
from retrain.registry import uncertainty

if TYPE_CHECKING:
    from torch import Tensor

_SURPRISAL_LIMIT = 50.0


@uncertainty("surprisal")
def surprisal(sampler_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """h = min(-log p, 50) nats of the sampled token: [N, T] in [0, 50], 0 outside the response."""
    return (-F.masked.keep(sampler_logprobs, response_mask)).clamp(max=_SURPRISAL_LIMIT)


@uncertainty("predictive_variance")
def predictive_variance(sampler_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """h = p * (1 - p) with p the probability of the sampled token: [N, T] in [0, 1/4], 0 outside the response."""
    p = F.masked.keep(sampler_logprobs, response_mask).exp()
    return p * (1 - p)


@uncertainty("shannon_entropy")
def shannon_entropy(entropy: Tensor) -> Tensor:
    """h = -sum_v p_v log p_v nats over the vocabulary: [N, T], at least 0."""
    return entropy


@uncertainty("varentropy")
def varentropy(varentropy: Tensor) -> Tensor:
    """h = sum_v p_v (log p_v)^2 - entropy^2, the variance of the surprisal over the vocabulary: [N, T], at least 0."""
    return varentropy
