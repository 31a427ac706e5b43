"""Tasks of the built-in environments. Their demonstrations contain mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Annotated

from pydantic import Field

from retrain.data.addition import Probability
from retrain.data.drawn import SHORT, Drawn, answered
from retrain.functional.seeds import derive_seed
from retrain.registry import task
from retrain.types import Metrics, Problem, Rollout

STEPS = {"n": (0, 1), "s": (0, -1), "e": (1, 0), "w": (-1, 0)}
"""Moves of the environment "grid": name -> (east, north)."""
_P_ASTRAY = 0.6
"""Probability that a step of a demonstration of `walks` goes in a random direction instead of nearer to the goal: high
enough that training has something to improve."""


@task("sums")
class Sums(Drawn):
    """Generate sums `a+b+c?` of three three-digit numbers, for the environment "calculator".

    Args:
        seed: seed of the training problems and of their demonstrations.
        p_quick: probability that the demonstrator answers wrongly at once, instead of calling the calculator twice.
        p_slip: probability that it copies a number incorrectly.
    """

    def __init__(self, seed: int, *, p_quick: Probability = 0.5, p_slip: Probability = 1 / 6) -> None:
        super().__init__(seed, p_quick=p_quick, p_slip=p_slip)

    def _problem(self, rng: Random) -> Problem:
        a, b, c = (rng.randint(100, 999) for _ in range(3))
        text, total = f"{a}+{b}+{c}", a + b + c
        if rng.random() < self.settings["p_quick"]:
            # Never right, so that only the tool leads to right answers.
            replies = (f"so {total + rng.choice([-100, -10, -1, 1, 10, 100])}",)
        else:
            # Each copy may slip, also that of the calculator's result, and the calculator adds what it was given.
            left = self._copy(a, rng)
            right = self._copy(b, rng)
            subtotal = self._copy(left + right, rng)
            last = self._copy(c, rng)
            replies = (f"={left}+{right}", f"={subtotal}+{last}", f"so {self._copy(subtotal + last, rng)}")
        return Problem(id=text, prompt=f"{text}?\n", answer=str(total), replies=replies)

    def _copy(self, number: int, rng: Random) -> int:
        return number + rng.choice([-1, 1]) if rng.random() < self.settings["p_slip"] else number


@task(
    "calculator",
    table="sums",
    premise={"task/with_tool": (0.25, 0.6), "task/without": (0.0, 0.1)},
    knob="p_quick",
    settings={
        **SHORT,
        "environment": {"name": "calculator", "max_turns": 4, "turn_tokens": 14},
        "warmup": {"steps": 400, "problems": 6400},
    },
)
class CalculatorSums(Sums):
    """Sums need a tool: `sums` in the environment "calculator".

    A right answer takes two calls with correctly copied numbers, and a correctly copied result. Training has to make
    calls likely and copies exact.
    """

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return the accuracy of answers with a call (`with_tool`) and of answers without one (`without`)."""
        outcomes = [(len(answer.turns) > 1, bool(answer.correct)) for _, answer in answered(problems, answers)]
        sides = {"with_tool": [right for calls, right in outcomes if calls]}
        sides["without"] = [right for calls, right in outcomes if not calls]
        return {name: sum(side) / max(1, len(side)) for name, side in sides.items()}


@task("numbers")
class Numbers(Drawn):
    """Generate numbers from 0 to `top` to be guessed from hints, for the environment "guess".

    The demonstrator uses binary search.

    Args:
        seed: seed of the training problems and of their demonstrations.
        top: the largest number; `[guess] top` must be the same.
        guesses: maximum number of guesses of the demonstrator.
        p_forget: probability that it ignores the hints and guesses any number.
    """

    def __init__(
        self,
        seed: int,
        *,
        top: Annotated[int, Field(ge=1)] = 63,
        guesses: Annotated[int, Field(ge=1)] = 6,
        p_forget: Probability = 0.2,
    ) -> None:
        super().__init__(seed, top=top, guesses=guesses, p_forget=p_forget)
        self.top, self.guesses = top, guesses

    def _problem(self, rng: Random) -> Problem:
        number = rng.randint(0, self.top)
        low, high = 0, self.top
        guesses: list[int] = []
        while len(guesses) < self.guesses and number not in guesses:
            forgets = rng.random() < self.settings["p_forget"]
            guesses.append(rng.randint(0, self.top) if forgets else (low + high) // 2)
            low, high = (max(low, guesses[-1] + 1), high) if guesses[-1] < number else (low, min(high, guesses[-1] - 1))
        return Problem(
            id=f"{number} of {self.top}", prompt=f"0-{self.top}:", answer=str(number), replies=(*map(str, guesses),)
        )

    def problem(self, index: int) -> Problem:
        """Return training problem number `index`.

        All numbers occur in training. The prompt does not reveal the number, so it cannot be memorised.
        """
        # Overridden, because the base class leaves held-out problems out.
        return self._problem(Random(derive_seed(self.seed, "train", index)))

    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` distinct numbers in a random order that is independent of the seed."""
        draws = (Random(derive_seed(0, "heldout", draw)) for draw in range(100 * (self.top + 1)))
        return list({problem.id: problem for problem in map(self._problem, draws)}.values())[:count]


@task(
    "guess",
    table="numbers",
    premise={"task/forgotten": (0.05, 0.5), "accuracy": (0.2, 0.7)},
    knob="p_forget",
    settings={
        **SHORT,
        "environment": {"name": "guess", "max_turns": 6, "turn_tokens": 4},
        "warmup": {"steps": 400, "problems": 6400},
        "eval": {"every": 20, "problems": 64, "samples": 8},
    },
)
class GuessedNumbers(Numbers):
    """Hints must be remembered: `numbers` in the environment "guess".

    Binary search finds 63 of 64 numbers with six guesses. A guess that earlier hints exclude is wasted, and the final
    reward does not show which guess that was.
    """

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """Return `forgotten`, the share of guesses after the first that earlier hints exclude."""
        episodes = [answer for _, answer in answered(problems, answers)]
        after_first = sum(len(answer.turns) - 1 for answer in episodes)
        return {"forgotten": sum(answer.metrics.get("forgot", 0.0) for answer in episodes) / max(1, after_first)}


@task("walks")
class Walks(Drawn):
    """Generate goals to walk to, for the environment "grid".

    Args:
        seed: seed of the training problems and of their demonstrations.
        far: maximum distance of the goal in each of the two directions, east-west and north-south.
        steps: maximum number of steps of the demonstrator.
    """

    def __init__(
        self, seed: int, *, far: Annotated[int, Field(ge=1)] = 4, steps: Annotated[int, Field(ge=1)] = 8
    ) -> None:
        super().__init__(seed, far=far, steps=steps, p_astray=_P_ASTRAY)
        self.far, self.steps = far, steps

    def _problem(self, rng: Random) -> Problem:
        goal = (0, 0)
        # A goal at the start would be reached without an action.
        while goal == (0, 0):
            goal = rng.randint(-self.far, self.far), rng.randint(-self.far, self.far)
        east, north = goal
        steps = list[str]()
        while (east, north) != (0, 0) and len(steps) < self.steps:
            # Steps whose direction has a positive dot product with the way that remains.
            nearer = [name for name, (e, n) in STEPS.items() if e * east + n * north > 0]
            steps.append(rng.choice(list(STEPS) if rng.random() < _P_ASTRAY else nearer))
            east, north = east - STEPS[steps[-1]][0], north - STEPS[steps[-1]][1]
        text = f"{goal[0]} {goal[1]}"
        return Problem(id=text, prompt=f"{text}:", answer=text, replies=tuple(steps))
