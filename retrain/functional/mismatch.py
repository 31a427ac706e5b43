"""Difference between the log-probs of sampler and trainer, as statistics that are additive over micro-batches."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retrain.functional.ratios import log_ratio

_MIN_SHARE = 2 / 3
"""A sampler is stale only if more than this share of its votes is for the old policy."""
_MAX_FALSE_ALARMS = 1e-6
"""Largest probability with which random votes are called stale."""


@dataclass(frozen=True)
class Mismatch:
    """Statistics of d = log p_trainer - log p_sampler over response tokens.

    The sum `a + b` has the statistics of two micro-batches together.

    Attributes:
        sums: [5] float64: number of tokens, and sums of |d|, k3 = rho - 1 - d, rho and rho^2, where rho = e^d.
        extremes: [3] float64: max |d|, max rho, max 1/rho.
    """

    sums: Float[Tensor, " 5"]
    extremes: Float[Tensor, " 3"]

    @staticmethod
    def of(
        logprobs: Float[Tensor, "N T"], sampler_logprobs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
    ) -> "Mismatch":
        """Return the statistics of one micro-batch.

        Args:
            logprobs: [N, T] log-probs by the trainer.
            sampler_logprobs: [N, T] log-probs by the sampler.
            mask: [N, T] response tokens.
        """
        # float64, because sums over many micro-batches lose digits in float32.
        difference = log_ratio(logprobs.detach(), sampler_logprobs, mask)[mask].double()
        ratio = difference.exp()
        kl = ratio - 1 - difference
        size = difference.abs()
        sums = torch.stack([torch.ones_like(ratio), size, kl, ratio, ratio.square()]).sum(-1)
        if not len(ratio):
            return Mismatch(sums, torch.zeros(3, dtype=torch.float64, device=sums.device))
        # max 1/rho instead of min rho, so that `+` can take the maximum of all three.
        return Mismatch(sums, torch.stack([size.max(), ratio.max(), 1 / ratio.min()]))

    def __add__(self, other: "Mismatch") -> "Mismatch":
        return Mismatch(self.sums + other.sums, torch.maximum(self.extremes, other.extremes))

    def metrics(self) -> dict[str, float]:
        """Return the metrics mismatch/*; no metrics if there are no tokens.

        They are the mean and maximum of |d|, the k3 estimate of KL(sampler || trainer), the minimum and
        maximum of rho, and `ess`: the effective sample size divided by the number n of tokens,
        (sum rho)^2 / (n * sum rho^2), in (0, 1], which is 1 if the policies agree.
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
    """Return True if a sampler is stale: its log-probs are those of an old policy, not of the new one.

    The update changes some tokens' log-probs more than others. The half of the tokens with the largest
    |new - old| vote: each for the policy whose log-prob is closer to the sampler's. The sampler is
    stale if all of these conditions hold:

    1. More than 2/3 of the votes are for the old policy. A sampler whose rounding error exceeds the
       update gets about half of the votes for each policy.
    2. This share is significant. With m random votes, its probability is at most
       exp(-2 m (share - 1/2)^2) (Hoeffding), which must be below 1e-6. So at least 28 unanimous votes
       are needed.
    3. Over the tokens that vote, sum |sampler - old| < sum |new - old|. This excludes imprecise samplers
       (with quantized weights), which are far from both policies.

    `new` and `old` must be at least as precise as `sampler`. With policies in bfloat16 the votes would
    not split evenly, because an update moves some weights to the next bfloat16 number and so changes
    the log-probs by several times the size of the update.

    Args:
        sampler: [n] log-probs of the tokens by the sampler, in nats.
        new: [n] log-probs of the same tokens by the new policy.
        old: [n] log-probs of the same tokens by the old policy.
    """
    moved = (new - old).abs()
    # A token that did not move cannot tell the policies apart. If most did not, the median is 0.
    chosen = (moved > 0) & (moved >= moved.median())
    votes = int(chosen.sum())
    if not votes:
        return False
    to_old, to_new = (sampler - old).abs()[chosen], (sampler - new).abs()[chosen]
    share = float((to_old < to_new).double().mean())
    significant = 2 * votes * (share - 0.5) ** 2 > -math.log(_MAX_FALSE_ALARMS)
    return share > _MIN_SHARE and significant and bool(to_old.sum() < moved[chosen].sum())
