"""The task `noisy` and its reward: a share of the training rewards is flipped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, cast

from retrain.data.addition import Addition, Digits, Probability
from retrain.data.drawn import SHORT, answered
from retrain.functional.seeds import derive_seed
from retrain.registry import reward, task
from retrain.types import Metrics, Problem, Rollout


@task(
    "noisy", premise={"task/flipped": (0.05, 0.15)}, knob="flips", settings={**SHORT, "rewards": [{"name": "flipped"}]}
)
@dataclass(frozen=True)
class Noisy(Addition):
    """One training reward in ten is flipped: it becomes 0 for a correct sum, or 1 for a wrong one.

    Rewards of held-out answers are not flipped. Equal answers to the same problem are either all flipped or none is.

    Args:
        flips: share of the training rewards that is flipped; the task's knob.
    """

    _: KW_ONLY
    p_slip: Probability = 0.08
    max_digits: Digits = 2
    flips: Probability = 0.1

    def problem(self, index: int) -> Problem:
        """Return training problem number `index`; its `extra` contains `flips` for the reward."""
        return replace(super().problem(index), extra={"flips": self.flips})

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return `flipped`: the share of these answers whose rewards would be flipped in training."""
        pairs = answered(problems, answers)
        return {"flipped": sum(_flips(p.id, a.text, self.flips) for p, a in pairs) / max(1, len(pairs))}


@reward("flipped")
def flipped(completion: str, answer: str, problem: Mapping[str, Any]) -> float:
    """1 if the last line is `so ANSWER`, else 0; flipped for a share `flips` of the completions.

    `flips` is in the problem's `extra`. A hash of the problem and the completion decides if the reward is flipped, so
    that a resumed run gets the same rewards.
    """
    value = float(completion.rstrip().rpartition("\n")[2] == f"so {answer}")
    share = float(cast("Mapping[str, Any]", problem["extra"]).get("flips", 0.0))
    return 1.0 - value if _flips(str(problem["id"]), completion, share) else value


def _flips(problem: str, completion: str, share: float) -> bool:
    # The low 20 bits of a hash are uniform, and fine enough for a share in millionths.
    return derive_seed(0, "flip", problem, completion) % 2**20 < share * 2**20
