"""An environment of your own: a generator that yields observations, is sent actions, and returns the reward."""

from collections.abc import Generator
from random import Random

from retrain import Action, Observation, Problem, environment, task


@environment("my_countdown")
def my_countdown(answer: str, rng: Random, *, lives: int = 3) -> Generator[Observation | None, Action, float]:
    """The model must say the answer; each wrong reply costs a life and is told how far off it was, or nothing.

    Args:
        lives: replies that may be wrong.
    """
    action = yield None  # the prompt says it all
    for left in reversed(range(lives)):
        if action.strip() == answer:
            return 1.0
        hint = f"off by {abs(int(action) - int(answer))}" if action.strip().isdecimal() and rng.random() < 0.5 else "no"
        action = yield Observation(f"{hint}, {left} left\n", reward=-0.1, metrics={"hints": hint != "no"})
    return float(action.strip() == answer)


@task("my_numbers")
class MyNumbers:
    """Problems for it, with the replies of an episode to imitate in the warm start."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def problem(self, index: int) -> Problem:
        """Training problem number `index`."""
        rng = Random(f"{self.seed} {index}")
        number, wrong = rng.randint(0, 9), rng.randint(0, 9)
        return Problem(str(index), f"{number - 1} + 1 = ", str(number), replies=(str(wrong), str(number)))

    def heldout(self, count: int) -> list[Problem]:
        """Held-out problems, the same for every seed."""
        return [Problem(f"held-out {n}", f"{n} + 1 = ", str(n + 1)) for n in range(min(count, 9))]
