"""The task `precision`: greedy decoding is correct, sampling makes mistakes."""

from __future__ import annotations

from dataclasses import dataclass

from retrain.data.addition import Addition, Digits, Probability
from retrain.data.drawn import SHORT
from retrain.registry import task


@task("precision", premise={"greedy_accuracy": (0.95, 1.0), "accuracy": (0.2, 0.5)}, knob="p_slip", settings=SHORT)
@dataclass(frozen=True, kw_only=True)
class Precision(Addition):
    """Greedy decoding is correct and sampling makes mistakes: sums of two numbers of two or three digits.

    A little less than half of the demonstrations answer at once, so that greedy decoding adds column by column. In a
    sampled answer every column may be wrong.

    Args:
        p_slip: probability that the demonstrator gets a column wrong; the task's knob.
    """

    p_slip: Probability = 0.12
    max_digits: Digits = 3
