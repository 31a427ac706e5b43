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
    """One training reward in ten is flipped: right answers lose, and wrong ones win.

    Held-out answers are scored as they are. The same answer to the same problem is flipped always or never.

    Args:
        flips: the knob: the share of rewards that is flipped.
    """

    _: KW_ONLY
    p_slip: Probability = 0.08
    max_digits: Digits = 2
    flips: Probability = 0.1

    def problem(self, index: int) -> Problem:
        """Training problem number `index`; its `extra` says how often its rewards are flipped."""
        return replace(super().problem(index), extra={"flips": self.flips})

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """`flipped`: the share of these answers whose rewards training would flip."""
        pairs = answered(problems, answers)
        return {"flipped": sum(_flips(p.id, a.text, self.flips) for p, a in pairs) / max(1, len(pairs))}


@reward("flipped")
def flipped(completion: str, answer: str, problem: Mapping[str, Any]) -> float:
    """1 if the last line is `so ANSWER`, else 0; the share `flips` in the problem's `extra` of these is turned round.

    A hash of the problem and the completion decides, so that a resumed run sees the same rewards.
    """
    value = float(completion.rstrip().rpartition("\n")[2] == f"so {answer}")
    share = float(cast("Mapping[str, Any]", problem["extra"]).get("flips", 0.0))
    return 1.0 - value if _flips(str(problem["id"]), completion, share) else value


def _flips(problem: str, completion: str, share: float) -> bool:
    return derive_seed(0, "flip", problem, completion) % 2**20 < share * 2**20
