"""Testbed tasks `strategy`, where greedy decoding is wrong, and `rare`, where about one sample in fifty is right."""

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
    """Greedy decoding is wrong, a rarer answer is right: most demonstrations of these sums forget the carry.

    The warm start learns from them. Training has to raise the probability of the rarer strategy, column by column,
    which raises greedy and sampled accuracy.

    Args:
        p_quick: probability that the demonstrator answers at once. It controls the difficulty of the task.
    """

    p_quick: Probability = 0.6
    q_carry: Probability = 0.0
    p_slip: Probability = 0.02
    max_digits: Digits = 2

    def _draw(self, rng: Random) -> tuple[int, int]:
        a, b = super()._draw(rng)
        # Without a carry both strategies give the same answer, and the problem would not tell them apart.
        while without_carries(a, b) == a + b:
            a, b = super()._draw(rng)
        return a, b


@task(
    "rare", premise={"pass@1": (0.01, 0.03), "pass@64": (0.5, 1.0)}, knob="p_quick", settings={**SHORT, "eval": _EVAL}
)
@dataclass(frozen=True, kw_only=True)
class Rare(Strategy):
    """Success comes in 1 to 3 % of samples: the policy can execute the right strategy, but hardly ever chooses it.

    Of the first `practice` demonstrations 40 % work column by column, as in `strategy`. Of the later ones only a share
    of 1 - p_quick does; the others answer at once and forget the carry.

    Args:
        p_quick: probability that a later demonstration answers at once. It controls the difficulty of the task.
        practice: number of training problems whose demonstrations often work column by column.
    """

    p_quick: Probability = 0.972
    practice: int = 8_000

    def _habits(self, index: int) -> Habits:
        # The habits of `strategy`, from which the policy learns to execute the column method.
        return replace(self, p_quick=0.6) if index < self.practice else self
