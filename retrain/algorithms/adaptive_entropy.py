"""Entropy bonus with a coefficient that keeps the policy's entropy near a target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retrain import functional as F
from retrain.protocols import StatefulComponent
from retrain.registry import Finding, loss, signal
from retrain.types import Batch, Metrics, State

if TYPE_CHECKING:
    from torch import Tensor

_NotNegative = Annotated[float, Field(ge=0)]


def _check_bounds(params: Mapping[str, Any], config: Any) -> Iterator[Finding]:
    """Require that the coefficient starts within its bounds."""
    if not params["min"] <= params["initial"] <= params["max"]:
        problem = f"initial = {params['initial']:g} is not between min = {params['min']:g} and max = {params['max']:g}"
        yield Finding(("initial",), problem, "change one of these keys")


@signal("entropy_coefficient", check=_check_bounds)
class EntropyCoefficient(StatefulComponent):
    """Coefficient alpha of the loss term `adaptive_entropy` at this step.

    alpha = c if H <= target else 0,  H = mean entropy of the batch's response tokens before the update
    after the step: c += delta if H <= target, else c -= delta; then c is clipped to [min, max]

    Args:
        target: entropy per token, in nats, up to which the bonus applies.
        delta: change of c per step.
        initial: value of c at the first step.
        min, max: bounds of c.
    References: He et al., Skywork Open Reasoner 1, arXiv:2505.22312. TRL (`use_adaptive_entropy`) uses the entropy of
        the previous step.
    """

    def __init__(
        self,
        *,
        target: _NotNegative = 0.2,
        delta: _NotNegative = 0.005,
        initial: _NotNegative = 0.0,
        min: _NotNegative = 0.0,
        max: _NotNegative = 1.0,
    ) -> None:
        self.target, self.delta, self.lowest, self.highest = target, delta, min, max
        self.value = initial

    def __call__(self, entropy: Tensor, response_mask: Tensor) -> tuple[float, Metrics]:
        """Return alpha, and the metric entropy_coefficient/alpha."""
        # c keeps its value while the bonus is off, so that a later bonus continues where the last one ended.
        alpha = self.value if self._is_low(entropy, response_mask) else 0.0
        return alpha, {"entropy_coefficient/alpha": alpha}

    def after(self, batch: Batch) -> Metrics:
        """Increase c if the entropy is at most the target, otherwise decrease it; without tokens it stays."""
        if bool(batch.response_mask.any()):  # the mean over no tokens, 0, would count as low
            change = self.delta if self._is_low(batch.column("entropy"), batch.response_mask) else -self.delta
            self.value = min(max(self.value + change, self.lowest), self.highest)
        return {}

    def _is_low(self, entropy: Tensor, mask: Tensor) -> bool:
        """Return True if the mean entropy of these tokens is at most the target."""
        return float(F.masked.masked_mean(entropy, mask)) <= self.target

    def state_dict(self) -> State:
        """Return the coefficient c."""
        return {"value": self.value}

    def load_state_dict(self, state: State) -> None:
        """Restore the state that `state_dict` returned."""
        self.value = float(state["value"])


@loss("adaptive_entropy")
def adaptive_entropy(entropy: Tensor, response_mask: Tensor, entropy_coefficient: float) -> Tensor:
    """Entropy bonus while the entropy is low.

    -alpha * H_t,  alpha = `entropy_coefficient`, H_t = -sum_v p_v log p_v of the policy at this position

    Args:
        entropy: [N, T] with gradient; response_mask: [N, T] bool; entropy_coefficient: a number.
    Returns:
        [N, T] nats, at most 0.
    References: He et al., Skywork Open Reasoner 1, arXiv:2505.22312.
    """
    return -entropy_coefficient * F.masked.keep(entropy, response_mask)
