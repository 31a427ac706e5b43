"""Problems of the built-in environments, with episodes of a demonstrator who makes mistakes."""

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
"""Of the environment "grid": (east, north)."""


@task("sums")
class Sums(Drawn):
    """Sums `a+b+c?` of three numbers of three digits, for the environment "calculator".

    Args:
        seed: of the training problems and of every demonstration.
        p_quick: how often the demonstrator answers at once, and wrongly, instead of calling the calculator twice.
        p_slip: how often it copies a number wrongly.
    """

    def __init__(self, seed: int, *, p_quick: Probability = 0.5, p_slip: Probability = 1 / 6) -> None:
        super().__init__(seed, p_quick=p_quick, p_slip=p_slip)

    def _problem(self, rng: Random) -> Problem:
        a, b, c = (rng.randint(100, 999) for _ in range(3))
        text, total = f"{a}+{b}+{c}", a + b + c
        if rng.random() < self.settings["p_quick"]:
            replies = (f"so {total + rng.choice([-100, -10, -1, 1, 10, 100])}",)
        else:
            first, second = self._copied(a, rng), self._copied(b, rng)
            third, fourth = self._copied(first + second, rng), self._copied(c, rng)
            replies = (f"={first}+{second}", f"={third}+{fourth}", f"so {self._copied(third + fourth, rng)}")
        return Problem(id=text, prompt=f"{text}?\n", answer=str(total), replies=replies)

    def _copied(self, number: int, rng: Random) -> int:
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
    """Sums that need a tool: `sums` in the environment "calculator".

    A right answer takes two calls, each of them and the answer copied without a mistake. Training has
    to make calls likely and copies exact.
    """

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """`with_tool` and `without`: the share of right answers among those with a call, and among the others."""
        said = [(len(answer.turns) > 1, bool(answer.correct)) for _, answer in answered(problems, answers)]
        sides = {"with_tool": [right for calls, right in said if calls]}
        sides["without"] = [right for calls, right in said if not calls]
        return {name: sum(side) / max(1, len(side)) for name, side in sides.items()}


@task("numbers")
class Numbers(Drawn):
    """Numbers in 0..top to be found from hints, for the environment "guess".

    Args:
        seed: of the training problems and of every demonstration.
        top: the largest number; `[guess] top` must be the same.
        guesses: of the demonstrator, who halves what the hints leave.
        p_forget: how often it forgets the hints and guesses any number.
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
        number, low, high = rng.randint(0, self.top), 0, self.top
        said: list[int] = []
        while len(said) < self.guesses and number not in said:
            forgets = rng.random() < self.settings["p_forget"]
            said.append(rng.randint(0, self.top) if forgets else (low + high) // 2)
            low, high = (max(low, said[-1] + 1), high) if said[-1] < number else (low, min(high, said[-1] - 1))
        return Problem(
            id=f"{number} of {self.top}", prompt=f"0-{self.top}:", answer=str(number), replies=(*map(str, said),)
        )

    def problem(self, index: int) -> Problem:
        """Any number: the prompt does not reveal it, so it cannot be memorised and needs no held-out set."""
        return self._problem(Random(derive_seed(self.seed, "train", index)))

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` numbers in an order of their own, each once."""
        draws = (Random(derive_seed(0, "heldout", draw)) for draw in range(100 * (self.top + 1)))
        return list({one.id: one for one in map(self._problem, draws)}.values())[:count]


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

    Six guesses find 63 of 64 numbers, if each halves what the hints before it leave. A guess outside of that is
    wasted, and the final reward does not show which one was.
    """

    def figures(self, problems: Sequence[Problem], answers: Sequence[Sequence[Rollout]]) -> Metrics:
        """`forgotten`: the share of guesses, the first aside, that the hints before them had excluded."""
        said = [answer for _, answer in answered(problems, answers)]
        after_first = sum(len(answer.turns) - 1 for answer in said)
        return {"forgotten": sum(answer.metrics.get("forgot", 0.0) for answer in said) / max(1, after_first)}


@task("walks")
class Walks(Drawn):
    """Ways to a goal, for the environment "grid".

    Args:
        seed: of the training problems and of every demonstration.
        far: how far the goal is at most, east or west and north or south.
        steps: of the demonstrator.
        p_astray: how often it goes anywhere instead of nearer.
    """

    def __init__(
        self,
        seed: int,
        *,
        far: Annotated[int, Field(ge=1)] = 4,
        steps: Annotated[int, Field(ge=1)] = 8,
        p_astray: Probability = 0.6,
    ) -> None:
        super().__init__(seed, far=far, steps=steps, p_astray=p_astray)
        self.far, self.steps = far, steps

    def _problem(self, rng: Random) -> Problem:
        goal = (0, 0)
        while goal == (0, 0):
            goal = rng.randint(-self.far, self.far), rng.randint(-self.far, self.far)
        (east, north), said = goal, list[str]()
        while (east, north) != (0, 0) and len(said) < self.steps:
            nearer = [name for name, (e, n) in STEPS.items() if e * east + n * north > 0]
            said.append(rng.choice(list(STEPS) if rng.random() < self.settings["p_astray"] else nearer))
            east, north = east - STEPS[said[-1]][0], north - STEPS[said[-1]][1]
        text = f"{goal[0]} {goal[1]}"
        return Problem(id=text, prompt=f"{text}:", answer=text, replies=tuple(said))
