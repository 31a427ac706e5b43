"""A component with a memory: a class that is built once for a run and saved in its checkpoints.

advantage_mode = "plugins.stateful.RunningBaseline"

[algorithm.advantage_params]
decay = 0.9
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retrain import Batch, advantage

if TYPE_CHECKING:
    from torch import Tensor


@advantage("running_baseline")
class RunningBaseline:
    """A_i = r_i - b, with b a moving average of the mean rewards of earlier steps: REINFORCE's classic baseline; [N].

    Unlike a group's mean it needs no group, so `group_size = 1` trains.
    """

    def __init__(self, *, decay: Annotated[float, Field(ge=0, lt=1)] = 0.9) -> None:
        self.decay = decay
        self.baseline: float | None = None

    def __call__(self, rewards: Tensor) -> Tensor:
        """The advantages of a step; changes nothing, because a step may ask more than once."""
        return rewards - (rewards.mean() if self.baseline is None else self.baseline)

    def before(self, batch: Batch) -> dict[str, float]:
        """Called when a step begins; what it returns goes into metrics.jsonl."""
        return {}

    def after(self, batch: Batch) -> dict[str, float]:
        """Called after the update: remember this step's rewards."""
        mean = float(batch.rewards.mean())
        self.baseline = mean if self.baseline is None else self.decay * self.baseline + (1 - self.decay) * mean
        return {"running_baseline/value": self.baseline}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: JSON values and tensors."""
        return {"baseline": self.baseline}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`."""
        self.baseline = state["baseline"]
