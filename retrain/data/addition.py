"""Column addition, shown by a demonstrator who makes mistakes: small enough to learn on a CPU."""

from __future__ import annotations

import hashlib
import json
from dataclasses import KW_ONLY, dataclass, fields
from functools import lru_cache
from random import Random
from typing import Annotated

from pydantic import Field

from retrain.errors import DataError
from retrain.functional.seeds import derive_seed
from retrain.protocols import Task
from retrain.registry import task
from retrain.types import Problem

Probability = Annotated[float, Field(ge=0, le=1)]
Digits = Annotated[int, Field(ge=1, le=12)]

HELDOUT_SHARE = 8
"""One unordered pair of summands in this many is held out."""


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Probabilities of the demonstrator's actions.

    Args:
        p_quick: answers at once instead of column by column.
        q_carry: remembers the carries when answering at once.
        p_slip: gets a column wrong.
        p_redo: notices a wrong column and writes it again.
        p_check: verifies a right column, per problem.
    """

    p_quick: Probability = 0.45
    q_carry: Probability = 0.2
    p_slip: Probability = 0.12
    p_redo: Probability = 0.4
    p_check: Probability = 0.15


@task("addition")
@dataclass(frozen=True)
class Addition(Habits, Task):
    """Sums `a+b?` of two numbers with the same count of digits; the answer follows a final `so`.

    Whether a problem is held out is a hash of its unordered pair of summands, so training and held-out
    problems are disjoint whatever the seed, and `12+34` never gives `34+12` away. Training problem i
    derives from (seed, i) alone. Longer numbers make it harder: with `min_digits = 3, max_digits = 4`
    few first attempts are right.

    Args:
        seed: of the training problems and of every demonstration.
        min_digits, max_digits: the count of digits is uniform between them, both included.
    """

    seed: int
    _: KW_ONLY
    min_digits: Digits = 2
    max_digits: Digits = 3

    def __post_init__(self) -> None:
        low, high = self.min_digits, self.max_digits
        if low > high:
            raise DataError(f"[addition] min_digits = {low} is above max_digits = {high}; swap them")

    def problem(self, index: int) -> Problem:
        """Training problem number `index`."""
        return self._training(index)

    @lru_cache(maxsize=1 << 12)  # noqa: B019 - the tokenizer and every warm start ask for the same ones again
    def _training(self, index: int) -> Problem:
        rng = Random(derive_seed(self.seed, "train", index))
        a, b = self._draw(rng)
        while is_heldout(a, b):
            a, b = self._draw(rng)
        return self._problem(a, b, rng, self._habits(index))

    def heldout(self, count: int) -> list[Problem]:
        """The first `count` distinct held-out problems; a range of one digit has only a few."""
        found: dict[tuple[int, int], Problem] = {}
        numbers = 10**self.max_digits - 10 ** (self.min_digits - 1)
        for draw in range(1000 + 20 * min(count, numbers**2)):
            if len(found) >= count:
                break
            rng = Random(derive_seed(0, "heldout", draw))
            a, b = self._draw(rng)
            if is_heldout(a, b) and (a, b) not in found:
                found[a, b] = self._problem(a, b, rng, self)
        return list(found.values())

    def fingerprint(self) -> str:
        """Hash of everything that determines the problems, except the seed."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        digits = [own.pop("min_digits"), own.pop("max_digits")]
        settings = {**own, "task": type(self).__name__.lower(), "digits": digits}
        del settings["seed"]
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()

    def _draw(self, rng: Random) -> tuple[int, int]:
        digits = rng.randint(self.min_digits, self.max_digits)
        low, high = 10 ** (digits - 1), 10**digits - 1
        return rng.randint(low, high), rng.randint(low, high)

    def _habits(self, index: int) -> Habits:
        """Of the demonstrator in the solution of training problem `index`."""
        return self

    def _problem(self, a: int, b: int, rng: Random, habits: Habits) -> Problem:
        solution = self._solution(a, b, rng, habits)
        return Problem(id=f"{a}+{b}", prompt=f"{a}+{b}?\n", answer=str(a + b), solution=solution)

    def _solution(self, a: int, b: int, rng: Random, habits: Habits) -> str:
        return demonstrate(a, b, rng, habits)


def is_heldout(a: int, b: int) -> bool:
    """Return whether this pair of summands, in either order, is held out."""
    pair = f"{min(a, b)}+{max(a, b)}"
    return hashlib.sha256(pair.encode()).digest()[0] % HELDOUT_SHARE == 0


def demonstrate(a: int, b: int, rng: Random, habits: Habits) -> str:
    """A worked solution of a + b: planning phrases, one line per column, `so NUMBER` last. Often wrong."""
    columns = _columns(a, b)
    if rng.random() < habits.p_quick:
        return f"so {a + b if rng.random() < habits.q_carry else without_carries(a, b)}"
    lines, total, carry = ["let me think"], 0, 0
    for place, (x, y) in enumerate(columns):
        written = _write_column((x, y, carry), rng, habits, habits.p_check / len(columns), lines)
        total += written % 10 * 10**place
        carry = int(written >= 10)
    total += carry * 10 ** len(columns)
    return "\n".join([*lines, f"so {total}"])


def without_carries(a: int, b: int) -> int:
    """The sum of every column alone: 75 for 57 + 28."""
    return sum((x + y) % 10 * 10**place for place, (x, y) in enumerate(_columns(a, b)))


def _write_column(column: tuple[int, int, int], rng: Random, habits: Habits, p_check: float, lines: list[str]) -> int:
    """Append the lines of one column (digit, digit, carry) and return the sum that is believed."""
    x, y, carry = column
    right = x + y + carry
    if rng.random() >= habits.p_slip:
        lines.append(_line(x, y, carry, right))
        if rng.random() < p_check:
            lines += ["let me check", _line(x, y, carry, right)]
        return right
    if carry and rng.random() < 0.5:
        wrong = x + y
        lines.append(_line(x, y, 0, wrong))
    else:
        wrong = max(0, right + rng.choice([-2, -1, 1, 2]))
        lines.append(_line(x, y, carry, wrong))
    if wrong != right and rng.random() < habits.p_redo:
        lines += ["wait let me redo", _line(x, y, carry, right)]
        return right
    return wrong


def _line(x: int, y: int, carry: int, result: int) -> str:
    return f"{x}+{y}{'+1' if carry else ''}={result}"


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Digit pairs from the units up; the shorter number is padded with zeros."""
    width = max(len(str(a)), len(str(b)))
    return [(a // 10**place % 10, b // 10**place % 10) for place in range(width)]
