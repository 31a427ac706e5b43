"""On-policy distillation: credit from a teacher's log-probs of the sampled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from retrain import functional as F
from retrain.registry import transform

if TYPE_CHECKING:
    from torch import Tensor


@transform("opd")
def opd(  # noqa: PLR0913 - four columns and three keys
    advantages: Tensor,
    teacher_logprobs: Tensor,
    sampler_logprobs: Tensor,
    response_mask: Tensor,
    *,
    coef: Annotated[float, Field(ge=0)] = 1.0,
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.0,
    outcome: Annotated[float, Field(ge=0)] = 1.0,
) -> Tensor:
    """On-policy distillation: add the log-prob difference of teacher and sampler to the advantage.

    A_t = outcome * A_t + sum_{s>=t} gamma^(s-t) * d_s,  d_t = coef * (teacher_lp_t - sampler_lp_t)

    The difference is clamped to +-20. Its negative is an estimate of the reverse KL to the teacher. It uses the
    sampler's log-probs and not the current policy's, so the advantage is constant during the update of a batch. A
    `whiten` after it would remove its mean.

    Args:
        advantages, teacher_logprobs, sampler_logprobs: [N, T]; response_mask: [N, T] bool.
        coef: weight of the teacher, in units of advantage per nat.
        gamma: discount of the differences of later tokens, per response token; with 0 only the token's own counts.
        outcome: weight of the advantages of earlier stages; 0 is distillation without rewards.
    Returns:
        [N, T]; `outcome` times the advantages where teacher and sampler agree.
    References: Agarwal et al., On-Policy Distillation, arXiv:2306.13649; Hübotter et al., SDPO, arXiv:2601.20802.
    """
    gap = coef * F.ratios.log_ratio(teacher_logprobs, sampler_logprobs, response_mask)
    # With 0 the sum is the token's own difference, without a loop over columns.
    if gamma:
        ahead = F.returns.discounted_sum(F.returns.pack(gap, response_mask), gamma)
        gap = F.returns.unpack(ahead, response_mask)
    return outcome * advantages + gap
