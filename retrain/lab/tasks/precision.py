"""The task `precision`: greedy decoding is right, sampling slips."""

from __future__ import annotations

from dataclasses import dataclass

from retrain.data.addition import Addition, Digits, Probability
from retrain.data.drawn import SHORT
from retrain.registry import task


@task("precision", premise={"greedy_accuracy": (0.95, 1.0), "accuracy": (0.2, 0.5)}, knob="p_slip", settings=SHORT)
@dataclass(frozen=True, kw_only=True)
class Precision(Addition):
    """Greedy decoding is right, sampling slips: sums of two numbers of two or three digits.

    A little less than half of the demonstrations answer at once, so the likeliest answer is worked out; but every
    column of a sampled one may go wrong.

    Args:
        p_slip: the knob: how often the demonstrator gets a column wrong.
    """

    p_slip: Probability = 0.12
    max_digits: Digits = 3
