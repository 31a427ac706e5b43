"""HICRA: more credit for planning tokens, which strategic grams or entropy identify."""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from retrain import functional as F
from retrain.algorithms.transforms.token_stages import NormScope, span_mean
from retrain.registry import transform
from retrain.types import Metrics

if TYPE_CHECKING:
    from torch import Tensor

Strength = Annotated[float, Field(ge=0, le=1)]


@transform("hicra")
def hicra(
    advantages: Tensor, planning_mask: Tensor, response_mask: Tensor, *, alpha: Strength = 0.2
) -> tuple[Tensor, Metrics]:
    """Increase the advantage of planning tokens: positive ones are amplified, negative ones reduced in size.

    A_t + alpha * |A_t| * planning_t

    The increase depends on the token's own advantage, which may differ between the turns of an episode.

    Args:
        advantages: [N, T]; planning_mask: [N, T], 1 on planning tokens; response_mask: [N, T] bool.
        alpha: strength; the sign of an advantage never changes.
    Returns:
        [N, T]; over all response tokens hicra/amplified_token_ratio, the share of changed tokens, and
        hicra/advantage_shift, the mean change. The shift is positive, about alpha * E|A| * ratio, so planning tokens
        are favored whatever the outcome.
    References: Wang et al., Emergent Hierarchical Reasoning in LLMs through RL (HICRA), arXiv:2509.03646.
    """
    return _amplified(advantages, planning_mask.bool(), response_mask, alpha)


@transform("hicra_entropy", table="hicra")
def hicra_entropy(  # noqa: PLR0913 - seven columns and five keys
    advantages: Tensor,
    entropy: Tensor,
    planning_mask: Tensor,
    lengths: Tensor,
    group_ids: Tensor,
    response_mask: Tensor,
    turn_ids: Tensor,
    *,
    alpha: Strength = 0.2,
    entropy_topk: Annotated[float, Field(ge=0, le=1)] = 0.3,
    threshold_rule: Literal["ceil", "strict"] = "ceil",
    use_planning_tokens: bool = False,
    per: NormScope = "episode",
) -> tuple[Tensor, Metrics]:
    """Amplify high-entropy tokens of completions that succeed and are longer than their group's mean.

    A_t * (1 + alpha * sign A_t) on selected tokens;  selected_t = high_t and amp_i, or planning_t if these are used
    amp_i = mean_t A_t > 0 and l_i > mean of l over the whole group

    Args:
        advantages: [N, T]; entropy: [N, T] nats, of the policy before the update; planning_mask: [N, T].
        lengths: [N] tokens; group_ids: [N]; response_mask: [N, T] bool; turn_ids: [N, T] int, from 0.
        alpha: strength; the sign of an advantage never changes.
        entropy_topk: share k of a sequence's n tokens that count as high entropy.
        threshold_rule: "ceil" selects the ceil(k * n) highest tokens, of equal ones the earlier; "strict" selects
            those above sorted[int((1 - k) * n)], which are fewer.
        use_planning_tokens: also select planning tokens, in every completion.
        per: the sequence that must succeed and whose n tokens are ranked: the whole "episode", or each "turn". l is
            the length of the episode in both cases.
    Returns:
        [N, T], and the metrics of `hicra`. A group of one is never longer than its mean.
    References: Wang et al., Emergent Hierarchical Reasoning (HICRA), arXiv:2509.03646, in the form of the authors'
        code.
    """
    pick = F.masked.row_top if threshold_rule == "ceil" else F.masked.row_above
    spans = [response_mask]
    if per == "turn":
        spans = [response_mask & (turn_ids == turn) for turn in range(int(turn_ids.max()) + 1)]
    high = reduce(or_, (pick(entropy, span, entropy_topk) for span in spans))
    succeeds = span_mean(per, advantages, response_mask, turn_ids) > 0
    # float64, so that a length equal to the mean does not exceed it by rounding.
    longer = lengths.double() > F.groups.group_mean(lengths.double(), group_ids)
    selected = high & succeeds & longer[:, None]
    if use_planning_tokens:
        selected = selected | planning_mask.bool()
    return _amplified(advantages, selected, response_mask, alpha)


def _amplified(advantages: Tensor, selected: Tensor, mask: Tensor, alpha: float) -> tuple[Tensor, Metrics]:
    """Return A + alpha * |A| on selected response tokens, A elsewhere, and the metrics of `hicra`."""
    # |A| and not A: planning tokens of failures lose less, instead of being blamed more.
    gain = F.masked.keep(alpha * advantages.abs(), selected & mask)
    return advantages + gain, {
        "hicra/amplified_token_ratio": float(F.masked.masked_mean((gain != 0).to(gain.dtype), mask)),
        "hicra/advantage_shift": float(F.masked.masked_mean(gain, mask)),
    }
