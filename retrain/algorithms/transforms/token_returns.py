"""Token advantages from returns: GAE and the optimal token baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from retrain import functional as F
from retrain.registry import transform

if TYPE_CHECKING:
    from torch import Tensor

PositiveFloat = Annotated[float, Field(gt=0)]


UnitInterval = Annotated[float, Field(ge=0, le=1)]


@transform("gae")
def gae(
    turn_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    *,
    gamma: UnitInterval = 1.0,
    lam: UnitInterval = 1.0,
    length_alpha: Annotated[float, Field(gt=0)] | None = None,
) -> Tensor:
    """Generalised advantage estimation with the critic's values; it replaces the advantages before it.

    A_t = delta_t + gamma * lam * A_{t+1},  delta_t = r_t + gamma * V_{t+1} - V_t
    length_alpha: lam_i = clip(1 - 1 / (length_alpha * l_i), 0, 1) instead of lam, l_i the row's response tokens

    t + 1 is the row's next response token; observations are skipped. V is 0 after the last one. verl always whitens
    these advantages: add `whiten` after this stage for the same result.

    Args:
        turn_rewards: [N, T], on the last token of each turn; values: [N, T], of the prefix before each token;
            response_mask: [N, T] bool.
        gamma: discount, per response token.
        lam: 1 is the return minus the value, without bias; 0 is the one-step difference, with the lowest variance.
        length_alpha: use a lambda per row that increases with its length; it is 0 up to 1 / length_alpha
            tokens. VAPO uses 0.05, for thousands of tokens.
    Returns:
        [N, T] in the unit of the reward.
    References: Schulman et al., High-Dimensional Continuous Control Using GAE, arXiv:1506.02438; Yue et al., VAPO,
        arXiv:2504.05118 (length_alpha).
    """
    import torch

    rewards = F.returns.pack(turn_rewards, response_mask)
    value = F.returns.pack(values, response_mask)
    lengths = response_mask.sum(-1).to(rewards.dtype)
    decay = torch.full_like(lengths, lam)
    if length_alpha is not None:
        decay = (1 - 1 / (length_alpha * lengths.clamp(min=1))).clamp(min=0, max=1)
    # Rows end with a value of 0, the padding or this column.
    ahead = torch.cat([value[:, 1:], value[:, :1] * 0], -1)
    return F.returns.unpack(F.returns.discounted_sum(rewards + gamma * ahead - value, gamma * decay), response_mask)


@transform("otb")
def otb(
    turn_rewards: Tensor,
    old_logprobs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    *,
    eps: PositiveFloat = 1e-8,
) -> Tensor:
    """Return of every token minus the token baseline with the lowest variance.

    A_it = G_it - B_t,  G_it = sum of rewards from position t on
    B_t = sum_i G_it W_it / (sum_i W_it + eps),  W_it = sum_{s<=t} (1 - 2 p_is + sum_v p_v^2)

    Sums over i are over the group's n rows that have a response token at position t. They include the row itself,
    which gives a bias of O(1/n). W is the squared norm of the score with respect to the logits, summed up to t. It
    replaces the advantages before it.

    Args:
        turn_rewards: [N, T], on the last token of each turn; old_logprobs: [N, T];
            sum_pi_squared: [N, T], sum of squared probabilities over the vocabulary at the
            sampling temperature; response_mask: [N, T] bool; group_ids: [N] int.
        eps: added to the sum of weights.
    Returns:
        [N, T] in the unit of the reward; G in a group of one; 0 where several rows have a token at a position and
        their returns are equal.
    References: Li et al., The Optimal Token Baseline, arXiv:2602.07078.
    """
    import torch

    pack = F.returns.pack
    present = pack(response_mask.to(old_logprobs.dtype), response_mask) > 0
    returns = F.returns.discounted_sum(pack(turn_rewards, response_mask), 1.0)
    p = pack(old_logprobs, response_mask).exp()
    # ||onehot - p||^2 = 1 - 2 p_token + sum p^2, the squared norm of the score.
    weights = (1 - 2 * p + pack(sum_pi_squared, response_mask)).where(present, 0.0).cumsum(-1)
    credit = torch.zeros_like(returns)
    for group in group_ids.unique():
        rows = (group_ids == group) & present.any(-1)
        if not rows.any():
            continue
        here = present[rows]
        value = returns[rows]
        # Behind its end, a row keeps the last value of its sum.
        weight = weights[rows].where(here, 0.0)
        baseline = (value * weight).sum(0) / (weight.sum(0) + eps)
        shared = here.sum(0) > 1
        highest = value.masked_fill(~here, -torch.inf).amax(0)
        # The weighted mean of equal returns may differ from them by rounding.
        equal = ((value == highest) | ~here).all(0)
        gain = (value - baseline).where(~(equal & shared), 0.0)
        # Beyond the second-longest row the baseline would be the longest row's own return, and its credit 0.
        credit[rows] = gain.where(shared, value)
    return F.returns.unpack(credit, response_mask)
