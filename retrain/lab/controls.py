"""Controls: credit with a known effect on training, which a report of the testbed must detect, and the placebo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from retrain import functional as F
from retrain.algorithms.transforms.token_stages import transform_chain
from retrain.functional.seeds import derive_seed
from retrain.protocols import StatefulComponent
from retrain.registry import Finding, advantage, find, is_dotted, names, transform
from retrain.types import Metrics

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


PLACEBO = "shuffled"


def _check_place(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Require token credit before the placebo, and corrections for the sampler behind it."""
    chain = transform_chain(config.algorithm.transform_mode)
    before = [*takewhile(lambda name: name != PLACEBO, chain)]
    if chain.count(PLACEBO) > 1:
        yield Finding((), "it is there twice, with the same order twice, which is no random order", "name it once")
    mode = config.algorithm.algorithm_mode or ""
    is_algorithm = mode in names("algorithm") or (is_dotted(mode) and not mode.endswith(".toml"))  # else a preset
    if not before and not is_algorithm:
        problem = "nothing before it gives tokens credit of their own, so it would change nothing"
        yield Finding((), problem, f'put it behind a transform, such as transform_mode = ["gtpo", "{PLACEBO}"]')
    registered = names("transform")
    for name in before:
        if name in registered and transform.traits_of(find("transform", name)).correction:
            problem = f'it would move the corrections of "{name}" to other tokens than they are made for'
            yield Finding((), problem, f"put it before {name}")


@transform(
    PLACEBO, check=_check_place, metrics={"shuffled/moved": "share of response tokens with other credit than before"}
)
def shuffled(advantages: Tensor, response_mask: Tensor, step: int) -> tuple[Tensor, Metrics]:
    """The placebo of all credit before it: every row keeps its token advantages, in a random order.

    A'_t = A_p(t),  p a random order of the row's response tokens: sum_t A'_t - sum_t A_t = 0

    Sum, sizes and signs of a row's credit stay; only where it falls is lost. A method that is not better than with its
    credit shuffled does not owe its gain to the tokens that it selects. The turns of an episode are one row. The order
    follows from the step's seed and the lengths of all rows of the batch: in another batch the same row has another.

    Args:
        advantages: [N, T]; response_mask: [N, T] bool; step: training step, from 0.
    Returns:
        [N, T]; and shuffled/moved, which is 0 if the credit before it is the same for all tokens of a row.
    References: the control is this package's own, after the randomised controls of attributions of Adebayo et al.,
        Sanity Checks for Saliency Maps, arXiv:1810.03292.
    """
    import torch

    # The loop has seeded the global generators for this step; drawing from them would change what others draw.
    credit = permuted_in_rows(advantages, response_mask, derive_seed(torch.initial_seed(), PLACEBO, step))
    moved = (credit != advantages).to(advantages.dtype)
    return credit, {"shuffled/moved": float(F.masked.masked_mean(moved, response_mask))}


def permuted_in_rows(values: Tensor, mask: Tensor, seed: int) -> Tensor:
    """Return [N, T] with the masked values of every row in a random order, which padding does not affect."""
    import torch

    row = mask.nonzero()[:, 0]
    order = torch.randperm(len(row), generator=torch.Generator().manual_seed(seed)).to(row.device)
    order = order[row[order].argsort(stable=True)]  # every token back into its row
    permuted = values.clone()
    permuted[mask] = values[mask][order]
    return permuted
