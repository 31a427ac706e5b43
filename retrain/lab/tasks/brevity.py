"""The task `brevity`: correct answers with redundant tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retrain.data.addition import Addition, Digits, Probability
from retrain.data.drawn import SHORT, CharSpan, answered
from retrain.registry import task
from retrain.types import Metrics, Problem, Rollout

_CHECK = re.compile(r"(?m)^(.+\n)(let me check\n\1)")


@task("brevity", premise={"task/redundant": (0.3, 1.0)}, knob="p_check", settings=SHORT)
@dataclass(frozen=True, kw_only=True)
class Brevity(Addition):
    """Correct answers are redundant by a third or more: they check columns that are right.

    Every demonstration adds column by column and writes correct columns a second time. Answers without these checks
    are as correct.

    Args:
        p_check: probability that the demonstrator checks the columns of a problem; the task's knob.
    """

    p_quick: Probability = 0.0
    p_slip: Probability = 0.12
    p_redo: Probability = 0.0
    p_check: Probability = 1.0
    max_digits: Digits = 2

    def spans(self, problem: Problem, text: str) -> Mapping[str, Sequence[CharSpan]]:
        """Return `redundant`: every check of a column, with its phrase."""
        return {"redundant": [match.span(2) for match in _CHECK.finditer(text)]}

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return `redundant`: the share of the correct answers' characters that are redundant."""
        # Wrong answers may be long for another reason than checks.
        right = [(p, a) for p, a in answered(problems, answers) if a.correct]
        checks = sum(end - start for p, a in right for start, end in self.spans(p, a.text)["redundant"])
        return {"redundant": checks / max(1, sum(len(a.text) for _, a in right))}
