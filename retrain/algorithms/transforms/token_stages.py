"""Token transforms, which distribute an episode's advantage over its tokens. Each stage is a pure function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from retrain import functional as F
from retrain.registry import transform

if TYPE_CHECKING:
    from torch import Tensor

CHAINS: dict[str, tuple[str, ...]] = {
    "none": (),
    "sepa": ("sepa", "gtpo"),
    "gtpo_sepa": ("sepa", "gtpo"),
    "gtpo_hicra": ("gtpo", "hicra"),
}
"""Values of `transform_mode` that name several stages, or none."""
DEFAULT_CORRECTION = "tis"
"""Default correction for the sampler's policy, if a run needs one."""

Level = Literal["token", "sequence", "geometric"]
NormScope = Literal["episode", "turn"]


def transform_chain(mode: str | Sequence[str]) -> tuple[str, ...]:
    """Return the stages of a `transform_mode`: the name of a chain or stage, a dotted path, or a list of stages."""
    return CHAINS.get(mode, (mode,)) if isinstance(mode, str) else tuple(mode)


def span_mean(per: NormScope, values: Tensor, mask: Tensor, turn_ids: Tensor) -> Tensor:
    """Mean over the masked tokens of each row, [N, 1], or of each turn, [N, T].

    Args:
        per: "episode" or "turn".
        values: [N, T]; mask: [N, T] bool; turn_ids: [N, T] int, from 0.
    """
    return F.masked.row_mean(values, mask) if per == "episode" else F.masked.turn_mean(values, mask, turn_ids)


@transform("gtpo")
def gtpo(
    advantages: Tensor,
    uncertainty: Tensor,
    response_mask: Tensor,
    turn_ids: Tensor,
    *,
    beta: Annotated[float, Field(ge=0)] = 0.1,
    per: NormScope = "episode",
) -> Tensor:
    """Scale the advantage by the token's uncertainty relative to the mean of its sequence.

    A_t * w_t,  w_t = max(0, 1 + beta * (h_t / (m + 1e-8) - 1)),  m = mean of h over the sequence's tokens

    Args:
        advantages, uncertainty: [N, T]; response_mask: [N, T] bool; turn_ids: [N, T] int, from 0.
        beta: strength; 0 leaves the advantages unchanged.
        per: the sequence: the sampled tokens of the "episode", or those of each "turn", which keeps the total credit
            of every turn.
    Returns:
        [N, T]; unchanged where m < 1e-7. Weights are not renormalized; their mean is 1 unless one is clipped at 0.
    References: Tan et al., GTPO and GRPO-S, arXiv:2508.04349 (the idea; here the weight is linear in h/m).
    """
    mean = span_mean(per, uncertainty, response_mask, turn_ids)
    # 1e-8 keeps 0 / 0 out of sequences without uncertainty, which the next line leaves unchanged.
    weight = (1 + beta * (F.masked.keep(uncertainty, response_mask) / (mean + 1e-8) - 1)).clamp(min=0)
    return advantages * weight.where(mean >= 1e-7, 1.0)


@transform("sepa", writes="uncertainty")
def sepa(
    uncertainty: Tensor,
    planning_mask: Tensor,
    response_mask: Tensor,
    turn_ids: Tensor,
    sepa_lambda: float,
    *,
    per: NormScope = "episode",
) -> Tensor:
    """Move the uncertainty of execution tokens towards their mean, so that planning tokens stand out.

    h'_t = lam * mean_exec(h) + (1 - lam) * h_t on execution tokens (mean per sequence); h_t on planning tokens

    Args:
        uncertainty: [N, T]; planning_mask: [N, T], 1 on planning tokens; response_mask: [N, T] bool;
            turn_ids: [N, T] int, from 0.
        sepa_lambda: lam, clipped to [0, 1].
        per: the sequence: the sampled tokens of the "episode", or those of each "turn".
    Returns:
        [N, T], the new `uncertainty` for later stages; the mean of a sequence does not change.
    References: Tan et al., GTPO and GRPO-S, arXiv:2508.04349 (token entropies); Wang et al., Emergent Hierarchical
        Reasoning (HICRA), arXiv:2509.03646 (planning tokens). The pooling is that of docs/sepa.md of
        github.com/teilomillet/retrain; no paper describes it.
    """
    lam = min(max(float(sepa_lambda), 0.0), 1.0)
    execution = response_mask & ~planning_mask.bool()
    # A sequence without execution tokens has the mean 0, which no token gets.
    pooled = lam * span_mean(per, uncertainty, execution, turn_ids) + (1 - lam) * uncertainty
    return pooled.where(execution, uncertainty)


@transform("surprisal_mask")
def surprisal_mask(
    advantages: Tensor,
    uncertainty: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    rho: Annotated[float, Field(ge=0, le=1)] = 0.0,
) -> Tensor:
    """Set advantages to 0 except for the most uncertain tokens of a group.

    A_t if h_t is among the ceil(rho * n) highest of the n tokens of its group, else 0

    Args:
        advantages, uncertainty: [N, T]; response_mask: [N, T] bool; group_ids: [N] int.
        rho: share of tokens that are kept, with all ties of the last one; 0 switches the stage off.
    Returns:
        [N, T].
    References: Wang et al., Beyond the 80/20 Rule, arXiv:2506.01939.
    """
    if rho == 0:
        return advantages
    kept = F.masked.top_fraction(uncertainty, response_mask, group_ids, rho)
    return F.masked.keep(advantages, kept)


@transform("whiten")
def whiten(advantages: Tensor, response_mask: Tensor) -> Tensor:
    """Normalise advantages to mean 0 and variance 1 over the tokens of the whole batch.

    (A_t - mean A) / sqrt(var A + 1e-8), mean and unbiased variance over all response tokens

    Args:
        advantages: [N, T]; response_mask: [N, T] bool.
    Returns:
        [N, T] without unit; 0 if all advantages are equal, as in a batch of one token.
    References: Hu et al., REINFORCE++, arXiv:2501.03262.
    """
    tokens = advantages[response_mask]
    # Equal advantages may differ from their mean by rounding, and 1e-8 divided by 1e-4 would be credit.
    if bool((tokens == tokens[:1]).all()):
        return advantages.new_zeros(advantages.shape)
    mean = F.masked.masked_mean(advantages, response_mask)
    variance = F.masked.masked_variance(advantages, response_mask, ddof=1)
    return F.masked.keep((advantages - mean) / (variance + 1e-8).sqrt(), response_mask)


@transform("tis", correction=True)
def tis(
    advantages: Tensor,
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    response_mask: Tensor,
    *,
    cap: Annotated[float, Field(gt=0)] = 2.0,
    level: Level = "token",
) -> Tensor:
    """Truncated importance weight of the trainer's policy relative to the sampler's.

    A_t * min(rho, cap),  rho = exp(old_lp - sampler_lp), log-ratio clamped to +-20

    At the end of a chain it is computed in the update, from the forward pass of the loss. Before other stages it needs
    a scoring forward pass of its own.

    Args:
        advantages, old_logprobs, sampler_logprobs: [N, T]; response_mask: [N, T] bool.
        cap: largest weight.
        level: ratio of the "token", of its "sequence" (sum of log-ratios), or the sequence's "geometric" mean.
    Returns:
        [N, T]; unchanged where sampler and trainer agree.
    References: Espeholt et al., IMPALA, arXiv:1802.01561 (truncation); Qi et al., Defeating the
        Training-Inference Mismatch via FP16, arXiv:2510.26788 (between engines).
    """
    ratio = F.ratios.log_ratio(old_logprobs, sampler_logprobs, response_mask, level).exp()
    return advantages * ratio.clamp(max=cap)


@transform("mis", correction=True)
def mis(  # noqa: PLR0913 - four columns and three keys
    advantages: Tensor,
    old_logprobs: Tensor,
    sampler_logprobs: Tensor,
    response_mask: Tensor,
    *,
    low: Annotated[float, Field(ge=0)] = 0.5,
    high: Annotated[float, Field(gt=0)] = 5.0,
    level: Level = "token",
) -> Tensor:
    """Importance weight of the trainer's policy relative to the sampler's, 0 where the ratio is outside bounds.

    A_t * rho if low <= rho <= high else 0,  rho = exp(old_lp - sampler_lp), log-ratio clamped to +-20

    At the end of a chain it is computed in the update, like `tis`.

    Args:
        advantages, old_logprobs, sampler_logprobs: [N, T]; response_mask: [N, T] bool.
        low, high: bounds of the ratio.
        level: ratio of the "token", of its "sequence" (sum of log-ratios), or the sequence's "geometric" mean.
    Returns:
        [N, T]; unchanged where sampler and trainer agree.
    References: Ling Team, Every Step Evolves (IcePop), arXiv:2510.18855; Qi et al., Defeating the
        Training-Inference Mismatch via FP16, arXiv:2510.26788.
    """
    ratio = F.ratios.log_ratio(old_logprobs, sampler_logprobs, response_mask, level).exp()
    return (advantages * ratio).where((ratio >= low) & (ratio <= high), 0.0)
