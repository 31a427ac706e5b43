"""The oracle: the true advantage of every token under the current policy, measured by continuations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retrain.functional.seeds import derive_seed
from retrain.lab.monte_carlo.prefixes import credit, prefixes, values_at
from retrain.protocols import StatefulComponent
from retrain.registry import algorithm, signal
from retrain.types import Continue, Metrics

if TYPE_CHECKING:
    from torch import Tensor


@signal("token_values", table="oracle", metrics={"oracle/tokens": "tokens sampled for continuations"})
class TokenValues(StatefulComponent):
    """Value of the state before every response token: the mean reward of continuations from there.

    V_t = E[reward | prompt, y_<t], from `continuations` samples of the policy; 0 outside response_mask

    Rows of a group with the same prefix share its continuations.

    Args:
        continuations: number of samples per distinct prefix; each has random numbers of its own.
    References: Kazemnejad et al., VinePPO, arXiv:2410.01679 (values from Monte-Carlo rollouts).
    """

    def __init__(self, continue_from: Continue, seed: int, *, continuations: Annotated[int, Field(ge=1)] = 8) -> None:
        self._continue, self._seed, self._count = continue_from, seed, continuations

    def __call__(
        self, problems: Any, input_ids: Tensor, response_mask: Tensor, group_ids: Tensor, step: int
    ) -> tuple[Tensor, Metrics]:
        """Return values [N, T] and the metric oracle/tokens, the number of sampled tokens."""
        # Every response token starts a segment of one token.
        distinct, numbers = prefixes(input_ids, response_mask, group_ids, response_mask)
        rewards, tokens = self._continue(problems, distinct, self._count, derive_seed(self._seed, "oracle", step))
        return values_at(response_mask, rewards, numbers), {"oracle/tokens": float(tokens)}


@algorithm("oracle")
def oracle(token_values: Tensor, rewards: Tensor, response_mask: Tensor) -> Tensor:
    """The true advantage of every token: the value after it minus the value before it.

    A_t = V_{t+1} - V_t,  V after the last token = the reward

    Args:
        token_values: [N, T]; rewards: [N]; response_mask: [N, T] bool.
    Returns:
        [N, T] in the unit of the reward; a row sums to its reward minus the value of its prompt. The gradient is an
        unbiased estimate of the policy gradient for any number of continuations.
    References: Sutton et al., Policy Gradient Methods (2000), for the advantage; Kazemnejad et al., VinePPO,
        arXiv:2410.01679, here with every token as a step.
    """
    return credit(token_values, response_mask, rewards, response_mask)
