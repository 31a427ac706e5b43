"""Task `addition`: column addition with imperfect demonstrations, small enough to train on a CPU."""

from __future__ import annotations

import hashlib
import json
from dataclasses import KW_ONLY, dataclass, fields
from functools import lru_cache
from random import Random
from typing import Annotated

from pydantic import Field

from retrain.errors import DataError
from retrain.functional.seeds import derive_seed, is_heldout
from retrain.protocols import Task
from retrain.registry import task
from retrain.types import Problem

Probability = Annotated[float, Field(ge=0, le=1)]
Digits = Annotated[int, Field(ge=1, le=12)]


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Probabilities of the demonstrator's actions.

    Args:
        p_quick: probability of answering at once instead of column by column.
        q_carry: probability of including the carries when answering at once.
        p_slip: probability of a mistake in a column.
        p_redo: probability of noticing a mistake in a column and writing the column again.
        p_check: expected number of checks of correct columns in a problem without mistakes.
    """

    p_quick: Probability = 0.45
    q_carry: Probability = 0.2
    p_slip: Probability = 0.12
    p_redo: Probability = 0.4
    p_check: Probability = 0.15


@task("addition")
@dataclass(frozen=True)
class Addition(Habits, Task):
    """Generate sums `a+b?` of two numbers with the same number of digits. The answer follows a final `so`.

    A hash of the unordered pair of summands decides whether a problem is held out. So training and held-out problems
    are disjoint for every seed, and `12+34` in training never reveals the answer of a held-out `34+12`. Training
    problem i depends only on the settings, the seed and i. Longer numbers are harder: with `min_digits = 3,
    max_digits = 4` few first attempts are right.

    Args:
        seed: seed of the training problems and of their demonstrations.
        min_digits: minimum number of digits. The number is uniform between minimum and maximum, both included.
        max_digits: maximum number of digits.
    """

    seed: int
    _: KW_ONLY
    min_digits: Digits = 2
    max_digits: Digits = 3

    def __post_init__(self) -> None:
        low, high = self.min_digits, self.max_digits
        if low > high:
            raise DataError(f"[addition] min_digits = {low} is greater than max_digits = {high}; swap them")

    def problem(self, index: int) -> Problem:
        """Return training problem number `index`."""
        return self._training(index)

    @lru_cache(maxsize=1 << 12)  # noqa: B019 - the tokenizer and every warm start use the same problems
    def _training(self, index: int) -> Problem:
        rng = Random(derive_seed(self.seed, "train", index))
        a, b = self._draw(rng)
        while pair_is_heldout(a, b):
            a, b = self._draw(rng)
        return self._problem(a, b, rng, self._habits(index))

    def heldout(self, count: int) -> list[Problem]:
        """Return the first `count` distinct held-out problems; fewer if there are fewer, as with one digit."""
        problems: dict[tuple[int, int], Problem] = {}
        numbers = 10**self.max_digits - 10 ** (self.min_digits - 1)
        # An eighth is held out. With one digit the draws soon repeat, so the search must end by itself.
        for draw in range(1000 + 20 * min(count, numbers**2)):
            if len(problems) >= count:
                break
            rng = Random(derive_seed(0, "heldout", draw))
            a, b = self._draw(rng)
            if pair_is_heldout(a, b) and (a, b) not in problems:
                problems[a, b] = self._problem(a, b, rng, self)
        return list(problems.values())

    def fingerprint(self) -> str:
        """Return a hash of everything that determines the problems, except the seed."""
        # The keys of the hash are those of older versions, whose runs can then be resumed.
        params = {key.name: getattr(self, key.name) for key in fields(self)}
        digits = [params.pop("min_digits"), params.pop("max_digits")]
        settings = {**params, "task": type(self).__name__.lower(), "digits": digits}
        del settings["seed"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def _draw(self, rng: Random) -> tuple[int, int]:
        digits = rng.randint(self.min_digits, self.max_digits)
        low, high = 10 ** (digits - 1), 10**digits - 1
        return rng.randint(low, high), rng.randint(low, high)

    def _habits(self, index: int) -> Habits:
        """Return the demonstrator's habits for the solution of training problem `index`."""
        return self

    def _problem(self, a: int, b: int, rng: Random, habits: Habits) -> Problem:
        solution = self._solution(a, b, rng, habits)
        return Problem(id=f"{a}+{b}", prompt=f"{a}+{b}?\n", answer=str(a + b), solution=solution)

    def _solution(self, a: int, b: int, rng: Random, habits: Habits) -> str:
        return demonstrate(a, b, rng, habits)


def pair_is_heldout(a: int, b: int) -> bool:
    """Return whether a pair of summands, in either order, is held out."""
    return is_heldout(f"{min(a, b)}+{max(a, b)}")


def demonstrate(a: int, b: int, rng: Random, habits: Habits) -> str:
    """Return a worked solution of a + b, which may be wrong.

    It has planning phrases, one line per column, and `so NUMBER` at the end; or only the last line, if the demonstrator
    answers at once.
    """
    columns = _columns(a, b)
    if rng.random() < habits.p_quick:
        return f"so {a + b if rng.random() < habits.q_carry else without_carries(a, b)}"
    lines = ["let me think"]
    total = carry = 0
    for index, (x, y) in enumerate(columns):
        written = _write_column((x, y, carry), rng, habits, habits.p_check / len(columns), lines)
        # A column's mistake carries over, as it does for a person who adds by columns.
        total += written % 10 * 10**index
        carry = int(written >= 10)
    total += carry * 10 ** len(columns)
    return "\n".join([*lines, f"so {total}"])


def without_carries(a: int, b: int) -> int:
    """Return the sum of a and b without carries: 75 for 57 + 28."""
    return sum((x + y) % 10 * 10**digit for digit, (x, y) in enumerate(_columns(a, b)))


def _write_column(column: tuple[int, int, int], rng: Random, habits: Habits, p_check: float, lines: list[str]) -> int:
    """Append the lines of one column to `lines`, and return the demonstrator's sum of the column, which may be wrong.

    Args:
        column: the two digits and the carry.
        rng: source of the demonstrator's mistakes.
        habits: probabilities of the demonstrator's actions.
        p_check: probability of checking this column if it is right.
        lines: lines of the solution so far.
    """
    x, y, carry = column
    right = x + y + carry
    if rng.random() >= habits.p_slip:
        lines.append(_line(x, y, carry, right))
        if rng.random() < p_check:
            lines += ["let me check", _line(x, y, carry, right)]
        return right
    # Half of the mistakes with a carry forget it; the others are off by one or two.
    if carry and rng.random() < 0.5:
        wrong = x + y
        lines.append(_line(x, y, 0, wrong))
    else:
        wrong = max(0, right + rng.choice([-2, -1, 1, 2]))
        lines.append(_line(x, y, carry, wrong))
    # max(0, ...) above may give the right digit by accident.
    if wrong != right and rng.random() < habits.p_redo:
        lines += ["wait let me redo", _line(x, y, carry, right)]
        return right
    return wrong


def _line(x: int, y: int, carry: int, result: int) -> str:
    return f"{x}+{y}{'+1' if carry else ''}={result}"


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Return the pairs of digits, the units first. The shorter number is padded with zeros."""
    width = max(len(str(a)), len(str(b)))
    return [(a // 10**digit % 10, b // 10**digit % 10) for digit in range(width)]
