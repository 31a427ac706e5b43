"""The task `strategy`: the likely way is wrong, a rarer way is right."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from retrain.data.addition import Addition, Digits, Probability, without_carries
from retrain.data.drawn import SHORT
from retrain.registry import task


@task("strategy", premise={"greedy_accuracy": (0.0, 0.35), "accuracy": (0.15, 0.45)}, knob="p_quick", settings=SHORT)
@dataclass(frozen=True, kw_only=True)
class Strategy(Addition):
    """The likely way is wrong, a rarer way is right: sums with a carry, most of which are answered without it.

    Training has to make the rarer way, column by column, the likely one: greedy and sampled accuracy both rise.

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
