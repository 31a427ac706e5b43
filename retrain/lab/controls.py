"""Controls: advantages with a known effect on training, which a report of the testbed must detect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain import functional as F
from retrain.functional.seeds import derive_seed
from retrain.protocols import StatefulComponent
from retrain.registry import advantage

if TYPE_CHECKING:
    from torch import Tensor


@advantage("reversed")
def reversed_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The group advantage with the wrong sign, which lowers the reward.

    A_i = mean_{j in group(i)} r_j - r_i

    Args:
        rewards: [N] float; group_ids: [N] int.
    Returns:
        [N] in the unit of the reward.
    References: Shao et al., DeepSeekMath, arXiv:2402.03300, whose advantage it negates.
    """
    return F.groups.group_mean(rewards, group_ids) - rewards


@advantage("random_credit")
class RandomCredit(StatefulComponent):
    """The group advantage, randomly permuted among the completions of the batch.

    A_i = r_p(i) - mean_{j in group(p(i))} r_j,  p a random order of the batch

    Args:
        seed: seed of the run; every step has a different permutation.
    Returns:
        [N] in the unit of the reward.
    References: Shao et al., DeepSeekMath, arXiv:2402.03300, whose advantage it permutes.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, rewards: Tensor, group_ids: Tensor, step: int) -> Tensor:
        """Return [N] in the unit of the reward; the permutation depends on seed and step only."""
        import torch

        generator = torch.Generator().manual_seed(derive_seed(self._seed, "random_credit", step))
        order = torch.randperm(len(rewards), generator=generator).to(rewards.device)
        return (rewards - F.groups.group_mean(rewards, group_ids))[order]
