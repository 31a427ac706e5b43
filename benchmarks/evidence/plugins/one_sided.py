"""Verdicts of the task `noisy` that are wrong in one direction only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain import reward
from retrain.lab.tasks.noisy import flipped

# Held-out answers have no `flips`, so that `flipped` judges them rightly, and so does the baseline here.
_RIGHT: Mapping[str, Any] = {"id": "", "extra": {}}


@reward("false_positives")
def false_positives(completion: str, answer: str, problem: Mapping[str, Any]) -> float:
    """1 for a correct sum, and for a share `flips` of the wrong ones."""
    return max(flipped(completion, answer, problem), flipped(completion, answer, _RIGHT))


@reward("false_negatives")
def false_negatives(completion: str, answer: str, problem: Mapping[str, Any]) -> float:
    """0 for a wrong sum, and for a share `flips` of the correct ones."""
    return min(flipped(completion, answer, problem), flipped(completion, answer, _RIGHT))
