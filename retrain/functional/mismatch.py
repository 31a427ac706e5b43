"""Difference of the sampler's and the trainer's log-probs, as sums that add up over micro-batches."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retrain.functional.ratios import log_ratio

_MAJORITY = 2 / 3
_FALSE_ALARM = 1e-6


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


def is_stale(sampler: Float[Tensor, " n"], new: Float[Tensor, " n"], old: Float[Tensor, " n"]) -> bool:
    """Return whether a sampler is stale: closer to an old policy than to the new one.

    The half of the tokens that the update moved most, by |new - old|, vote: each for the policy whose
    log-prob is closer to the sampler's. The sampler is stale if all of this holds:

    1. More than 2/3 of the n votes are for the old policy. If the sampler's rounding exceeds the update,
       the votes split evenly. Rounding of `new` and `old` does not split them: an update tips weights
       between two bfloat16 numbers, which moves the log-probs of a policy with rounded weights by
       several times the update. So both must be computed at least as exactly as the sampler computes.
    2. The share is significant. Fair votes reach it with a probability of at most
       exp(-2 n (share - 1/2)^2) (Hoeffding), which must be below 1e-6, so at least 28 unanimous votes
       are needed.
    3. The sampler is closer to the old policy than the new one is: sum |sampler - old| < sum |new - old|.
       This excludes coarse samplers (with quantized weights), which are far from both policies.

    Args:
        sampler, new, old: log-probs of the same n tokens, in nats; of the last two see 1.
    """
    moved = (new - old).abs()
    chosen = (moved > 0) & (moved >= moved.median())
    votes = int(chosen.sum())
    if not votes:
        return False
    to_old, to_new = (sampler - old).abs()[chosen], (sampler - new).abs()[chosen]
    share = float((to_old < to_new).double().mean())
    sure = 2 * votes * (share - 0.5) ** 2 > -math.log(_FALSE_ALARM)
    return share > _MAJORITY and sure and bool(to_old.sum() < moved[chosen].sum())
