"""How far the sampler's log-probs are from the trainer's, in sums that micro-batches add up."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retrain.functional.ratios import log_ratio


@dataclass(frozen=True)
class Mismatch:
    """Additive statistics of d = log p_trainer - log p_sampler over response tokens; `a + b` merges them.

    Attributes:
        sums: [5] float64: tokens, and sums of |d|, k3 = rho - 1 - d, rho and rho^2, with rho = e^d.
        extremes: [3] float64: max |d|, max rho, max 1/rho.
    """

    sums: Float[Tensor, " 5"]
    extremes: Float[Tensor, " 3"]

    @staticmethod
    def of(
        logprobs: Float[Tensor, "N T"], sampler_logprobs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
    ) -> "Mismatch":
        """Statistics of one micro-batch: the trainer's and the sampler's log-probs at the mask's positions."""
        difference = log_ratio(logprobs.detach(), sampler_logprobs, mask)[mask].double()
        ratio = difference.exp()
        kl = ratio - 1 - difference
        size = difference.abs()
        sums = torch.stack([torch.ones_like(ratio), size, kl, ratio, ratio.square()]).sum(-1)
        if not len(ratio):
            return Mismatch(sums, torch.zeros(3, dtype=torch.float64, device=sums.device))
        return Mismatch(sums, torch.stack([size.max(), ratio.max(), 1 / ratio.min()]))

    def __add__(self, other: "Mismatch") -> "Mismatch":
        return Mismatch(self.sums + other.sums, torch.maximum(self.extremes, other.extremes))

    def metrics(self) -> dict[str, float]:
        """mismatch/*: mean and max |d|, KL(sampler || trainer) by k3, extremes of rho, effective sample share.

        `ess` = (sum rho)^2 / (n * sum rho^2), in (0, 1]; 1 when both agree. Empty without tokens.
        """
        count, size, kl, ratio, square = self.sums.tolist()
        if not count:
            return {}
        largest, ratio_max, inverse_max = self.extremes.tolist()
        return {
            "mismatch/logp_diff_mean": size / count,
            "mismatch/logp_diff_max": largest,
            "mismatch/kl": kl / count,
            "mismatch/ratio_min": 1 / inverse_max,
            "mismatch/ratio_max": ratio_max,
            "mismatch/ess": ratio * ratio / (count * square),
        }
