"""The task `decoy`: planning phrases without effect on the answer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from retrain.data.addition import Addition, Digits, Habits, Probability
from retrain.data.drawn import SHORT, CharSpan
from retrain.lab.tasks.explained_variance import explained
from retrain.registry import task
from retrain.types import Metrics, Problem, Rollout

PHRASES = ("notice that", "what if we", "the key is")
_PHRASE = re.compile("|".join(PHRASES))


@task("decoy", premise={"task/explained": (-0.02, 0.02)}, knob="p_phrase", settings=SHORT)
@dataclass(frozen=True, kw_only=True)
class Decoy(Addition):
    """Planning phrases have no effect: they precede columns of a sum at random, right and wrong ones alike.

    Args:
        p_phrase: probability that a phrase precedes a column; the task's knob.
    """

    p_quick: Probability = 0.0
    p_slip: Probability = 0.12
    p_redo: Probability = 0.0
    p_check: Probability = 0.0
    max_digits: Digits = 2
    p_phrase: Probability = 0.8

    def _solution(self, a: int, b: int, rng: Random, habits: Habits) -> str:
        lines: list[str] = []
        # Without the opening "let me think", planning phrases stand only where chance puts them.
        for line in super()._solution(a, b, rng, habits).splitlines()[1:]:
            if "=" in line and rng.random() < self.p_phrase:
                lines.append(rng.choice(PHRASES))
            lines.append(line)
        return "\n".join(lines)

    def spans(self, problem: Problem, text: str) -> Mapping[str, Sequence[CharSpan]]:
        """Return `planning`: the phrases."""
        return {"planning": [match.span() for match in _PHRASE.finditer(text)]}

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return `explained`: the share of the outcome's variance that an answer's first phrase explains.

        An answer without phrases counts as having a phrase of its own kind.
        """
        drawn = [([*_PHRASE.findall(a.text), ""][0], bool(a.correct)) for group in answers for a in group]
        return {"explained": explained([("", phrase, float(right)) for phrase, right in drawn])}
