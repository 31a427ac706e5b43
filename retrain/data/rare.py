"""The task `rare`: one sample in fifty is right."""

from __future__ import annotations

from dataclasses import dataclass, replace

from retrain.data.addition import Habits, Probability
from retrain.data.drawn import SHORT
from retrain.data.strategy import Strategy
from retrain.registry import task

_EVAL = {"every": 40, "problems": 64, "samples": 64, "pass_at": [1, 64]}


@task(
    "rare", premise={"pass@1": (0.01, 0.03), "pass@64": (0.5, 1.0)}, knob="p_quick", settings={**SHORT, "eval": _EVAL}
)
@dataclass(frozen=True, kw_only=True)
class Rare(Strategy):
    """Success comes in 1 to 3 % of samples: the right way of `strategy`, known well and hardly ever taken.

    The first demonstrations mostly show the right way; then the demonstrator becomes lazy.

    Args:
        p_quick: the knob: how often the lazy demonstrator answers at once.
        practice: training problems whose solutions come before that.
    """

    p_quick: Probability = 0.972
    practice: int = 8_000

    def _habits(self, index: int) -> Habits:
        return replace(self, p_quick=0.6) if index < self.practice else self
