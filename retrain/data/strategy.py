"""The tasks `strategy`, where greedy decoding is wrong, and `rare`, where one sample in fifty is right."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from retrain.data.addition import Addition, Digits, Habits, Probability, without_carries
from retrain.data.drawn import SHORT
from retrain.registry import task

_EVAL = {"every": 40, "problems": 64, "samples": 64, "pass_at": [1, 64]}


@task("strategy", premise={"greedy_accuracy": (0.0, 0.35), "accuracy": (0.15, 0.45)}, knob="p_quick", settings=SHORT)
@dataclass(frozen=True, kw_only=True)
class Strategy(Addition):
    """Greedy decoding is wrong, a rarer answer is right: sums whose demonstrations mostly forget the carry.

    Training has to make the rarer way, column by column, likely: greedy and sampled accuracy rise.

    Args:
        p_quick: the knob: how often the demonstrator answers at once.
    """

    p_quick: Probability = 0.6
    q_carry: Probability = 0.0
    p_slip: Probability = 0.02
    max_digits: Digits = 2

    def _draw(self, rng: Random) -> tuple[int, int]:
        a, b = super()._draw(rng)
        while without_carries(a, b) == a + b:
            a, b = super()._draw(rng)
        return a, b


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
