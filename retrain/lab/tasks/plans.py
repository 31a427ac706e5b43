"""The task `planning`: an early plan decides the answer, and the right plan depends on the problem."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random

from retrain.data.addition import Probability
from retrain.data.drawn import SHORT, CharSpan, Drawn, answered
from retrain.lab.tasks.explained_variance import explained
from retrain.registry import task
from retrain.types import Metrics, Problem, Rollout

PLANS = {"notice that": (1, 1), "what if we": (1, 0), "the key is": (0, 1)}
"""Planning phrase -> (factor of the first number's digit, factor of the second's). A digit of the answer is the sum of
the two products modulo 10."""

_LETTERS = "xyz"
_PLAN = re.compile("|".join(PLANS))


@task(
    "planning",
    table="plans",
    premise={"task/explained": (0.5, 1.0), "accuracy": (0.2, 0.5)},
    knob="p_slip",
    settings=SHORT,
)
class Planning(Drawn):
    """An early plan decides the answer. The problem determines which is right; demonstrations choose one at random.

    The letter of `37x52?` determines the right plan: add the digits of the two numbers (x), copy those of the first (y)
    or copy those of the second (z). A demonstration begins with the phrase of one of the three plans, chosen at random,
    and then follows it.

    Args:
        seed: seed of the training problems and of every demonstration.
        p_slip: probability that the demonstrator gets a digit wrong; the task's knob. The plan then explains less of
            the outcome.
    """

    def __init__(self, seed: int, *, p_slip: Probability = 0.03) -> None:
        super().__init__(seed, p_slip=p_slip)
        self.p_slip = p_slip

    def _problem(self, rng: Random) -> Problem:
        left, right = ([rng.randrange(1, 10) for _ in range(2)] for _ in range(2))
        text = f"{left[0]}{left[1]}{rng.choice(_LETTERS)}{right[0]}{right[1]}"
        # Chosen without a look at the problem: the policy has to learn which plan fits.
        plan = rng.choice(list(PLANS))
        lines: list[str] = []
        worked = ""
        for x, y in zip(left, right, strict=True):
            slip = rng.randrange(1, 10) if rng.random() < self.p_slip else 0
            worked += str((_combined(x, y, plan) + slip) % 10)
            lines.append(f"{x}:{y}={worked[-1]}")
        answer = "".join(str(_combined(x, y, _right_plan(text))) for x, y in zip(left, right, strict=True))
        solution = "\n".join([plan, *lines, f"so {worked}"])
        return Problem(id=text, prompt=f"{text}?\n", answer=answer, solution=solution)

    def spans(self, problem: Problem, text: str) -> Mapping[str, Sequence[CharSpan]]:
        """Return `planning`: the phrase of the plan at the start of the text."""
        return {"planning": [match.span() for match in [_PLAN.match(text)] if match]}

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return figures of the premise.

        `explained`: the share of the outcome's variance that the plan explains, within problems with the same right
        plan. `right_plan`: the share of answers with the right plan.
        """
        pairs = answered(problems, answers)
        rows = [(_right_plan(p.id), match[0] if (match := _PLAN.match(a.text)) else "", a.correct) for p, a in pairs]
        right = sum(plan == wanted for wanted, plan, _ in rows) / max(1, len(rows))
        return {"explained": explained([(w, p, float(bool(c))) for w, p, c in rows]), "right_plan": right}


def _right_plan(text: str) -> str:
    """Return the right plan of a problem, by its letter."""
    return list(PLANS)[_LETTERS.index(text[2])]


def _combined(x: int, y: int, plan: str) -> int:
    left, right = PLANS[plan]
    return (left * x + right * y) % 10
