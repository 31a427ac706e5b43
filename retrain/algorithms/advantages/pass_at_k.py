"""Advantages that optimise the best of k completions instead of the mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import comb, sqrt
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retrain.algorithms.advantages.group_baselines import rloo
from retrain.registry import Finding, advantage

if TYPE_CHECKING:
    from torch import Tensor

SubsetSize = Annotated[int, Field(ge=1)]


def _check_subset(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Report an error if k is larger than the group size."""
    k, size = params["k"], config.training.group_size
    if k > size:
        yield Finding(("k",), f"k = {k} is larger than group_size = {size}", f"set k <= {size}")


@advantage("pkpo", check=_check_subset)
def pkpo(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    k: SubsetSize = 4,
    baseline: Literal["loo_minus_one", "none"] = "loo_minus_one",
) -> Tensor:
    """Advantage for the objective E[maximum reward of k completions].

    loo_minus_one:  A_i = n / C(n,k) * sum_{j<p} C(j-1,k-2) (g_p - g_j);  k = 1 is `rloo`
    none:           A_i = n / C(n,k) * (C(p-1,k-1) g_p + sum_{j>p} C(j-2,k-2) g_j);  k = 1: g_p

    g_1 <= ... <= g_n are the n rewards of a group in ascending order, and p is the rank of row i.
    The mean over rows of A_i * grad log p_i is an unbiased estimate of the gradient of the objective.

    For k > 1, advantages are at least 0 (with "none", if the rewards are). They are at most k times the range of the
    rewards, with "none" k times the largest reward, so a learning rate tuned for `grpo` is too large. `whiten` makes
    some of the advantages negative.

    Args:
        rewards: [N] float, any unit; group_ids: [N] int.
        k: number of completions of which the best counts. In a group with fewer than k rows, k is its number of rows.
        baseline: "loo_minus_one" subtracts a baseline, for k > 1 computed from k - 1 other rows. With "none", the
            variance is larger, and the advantage of a single row is its reward.
    Returns:
        [N] in the unit of the reward; 0 in a group of equal rewards with "loo_minus_one".
    References: Walder and Karkhanis, Pass@K Policy Optimization, arXiv:2505.15201 (n times the
        estimators s^(loo-1) and s of the paper).
    """
    advantages = rloo(rewards, group_ids) if baseline == "loo_minus_one" else rewards.clone()
    for group in group_ids.unique():
        rows = (group_ids == group).nonzero().squeeze(-1)
        n = len(rows)
        subset = min(k, n)
        # The values from before the loop are the formula for k = 1.
        if subset == 1:
            continue
        # Equal rewards get equal credit at any rank, so the order among them does not matter.
        ordered, order = rewards[rows].sort(stable=True)
        if baseline == "loo_minus_one":
            # Python's integers hold any C(n, k) exactly. `tril` keeps the rewards below each rank.
            below = [n * comb(j, subset - 2) / comb(n, subset) for j in range(n)]
            gaps = (ordered[:, None] - ordered).tril()
            credit = (gaps * ordered.new_tensor(below)).sum(-1)
        else:
            shares = [n * comb(p, subset - 1) / comb(n, subset) for p in range(n)]
            # The sum over higher ranks is the total minus the sum up to this rank.
            above = [n * comb(j - 1, subset - 2) / comb(n, subset) if j else 0.0 for j in range(n)]
            weighted = ordered * ordered.new_tensor(above)
            credit = ordered * ordered.new_tensor(shares) + weighted.sum() - weighted.cumsum(0)
        advantages[rows[order]] = credit
    return advantages


@advantage("pass_at_k", check=_check_subset)
def pass_at_k(correct: Tensor, group_ids: Tensor, *, k: SubsetSize = 4) -> Tensor:
    """Advantage for pass@k: the normalised best reward of k rows, averaged over subsets that contain the completion.

    A = (1 - R) / sd on correct rows,  A = (1 - R - C(w-1,k-1) / C(n-1,k-1)) / sd on wrong rows,
    R = 1 - C(w,k) / C(n,k),  sd = sqrt(R (1 - R)),  w wrong rows of n; 0 where sd = 0

    A is the mean of (best reward of the subset - R) / sd over all subsets of k rows that contain the row.

    Args:
        correct: [N] bool; group_ids: [N] int. Partial rewards are not used.
        k: size of a subset; k = 1 is `grpo_std` for 0/1 rewards. In a group with fewer than k rows, k is its number of
            rows.
    Returns:
        [N] float32 without unit. 0 in a group with more than n - k correct rows, where every subset has one, and in
        a group without correct rows.
    References: Chen et al., Pass@k Training, arXiv:2508.10751 (its analytical form).
    """
    advantages = correct.float()  # only for its shape: every entry is replaced below
    for group in group_ids.unique():
        rows = group_ids == group
        n = int(rows.sum())
        wrong, subset = n - int(correct[rows].sum()), min(k, n)
        # Probability that no row of a random subset is correct, 1 - R.
        failing = comb(wrong, subset) / comb(n, subset)
        spread = sqrt(failing * (1 - failing))
        right = failing / spread if spread else 0.0
        # The same probability for subsets that contain one wrong row.
        others = comb(wrong - 1, subset - 1) / comb(n - 1, subset - 1) if wrong else 0.0
        lost = (failing - others) / spread if spread else 0.0
        advantages[rows & correct] = right
        advantages[rows & ~correct] = lost
    return advantages
