"""The task `chain`: ten steps, all of which must be right."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Annotated

from pydantic import Field

from retrain.data.addition import Probability
from retrain.data.drawn import SHORT, CharSpan, Drawn, answered
from retrain.registry import task
from retrain.types import Metrics, Problem, Rollout

_STEP = re.compile(r"\+(\d)=(\d)\n")


@task("chain", premise={"task/gap": (0.0, 0.08), "accuracy": (0.15, 0.7)}, knob="p_slip", settings=SHORT)
class Chain(Drawn):
    """One wrong step of ten usually makes the answer wrong: digits are added one by one, modulo 10.

    If steps are right with probability p, the answer is right with a probability of about p^steps. The first wrong
    step of an answer is known.

    Args:
        seed: seed of the training problems and of every demonstration.
        p_slip: probability that the demonstrator gets a step wrong; the task's knob.
        steps: number of digits that are added to the first one.
    """

    def __init__(
        self, seed: int, *, p_slip: Probability = 0.08, steps: Annotated[int, Field(ge=1, le=40)] = 10
    ) -> None:
        super().__init__(seed, p_slip=p_slip, steps=steps)
        self.p_slip, self.steps = p_slip, steps

    def _problem(self, rng: Random) -> Problem:
        digits = [rng.randrange(10) for _ in range(self.steps + 1)]
        value, lines = digits[0], list[str]()
        for digit in digits[1:]:
            value = (value + digit + (rng.randrange(1, 10) if rng.random() < self.p_slip else 0)) % 10
            lines.append(f"+{digit}={value}\n")
        text = "+".join(map(str, digits))
        answer = str(sum(digits) % 10)
        return Problem(id=text, prompt=f"{text}?\n", answer=answer, solution=f"{''.join(lines)}so {value}")

    def spans(self, problem: Problem, text: str) -> Mapping[str, Sequence[CharSpan]]:
        """Return `mistake`: the first wrong step; empty if all steps are right.

        If the text after the right steps does not match a step, it is the rest of the text.
        """
        # What cannot be read as a step is the mistake, up to the end: nothing behind it can be judged.
        done, span = _right_steps(problem, text)
        return {"mistake": [span] if span else [] if done == self.steps else [(_end(text, done), len(text))]}

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return figures of the premise.

        `step`: the share p of right steps among the steps before which no step is wrong. `gap`: |P(correct) - p^steps|.
        """
        pairs = answered(problems, answers)
        done = [_right_steps(p, a.text)[0] for p, a in pairs]
        # The first wrong step was tried as well, unless all were right.
        tried = sum(min(count + 1, self.steps) for count in done)
        step, right = sum(done) / max(1, tried), sum(bool(a.correct) for _, a in pairs) / max(1, len(pairs))
        return {"step": step, "gap": abs(right - step**self.steps)}


def _right_steps(problem: Problem, text: str) -> tuple[int, CharSpan | None]:
    """Return the number of right steps before the first wrong one, and the span of that one.

    The span is None if all steps are right, or if the text that follows is not a step.
    """
    first, *digits = map(int, problem.id.split("+"))
    value, start = first, 0
    for done, digit in enumerate(digits):
        value, step = (value + digit) % 10, _STEP.match(text, start)
        if step is None:
            return done, None
        if (int(step[1]), int(step[2])) != (digit, value):
            return done, step.span()
        start = step.end()
    return len(digits), None


def _end(text: str, steps: int) -> int:
    """Return the position in the text at which the first `steps` steps end."""
    # With no right step the position is the beginning of the text.
    return [0, *(step.end() for step in _STEP.finditer(text))][steps]
