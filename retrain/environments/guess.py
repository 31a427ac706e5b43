"""A number to be guessed from hints: reward that comes turn by turn."""

from __future__ import annotations

from math import log2
from typing import Annotated

from pydantic import Field

from retrain import Say, environment
from retrain.environments.contract import Game


@environment("guess")
def guess(
    answer: str,
    *,
    top: Annotated[int, Field(ge=1)] = 63,
    guesses: Annotated[int, Field(ge=1)] = 6,
    shaping: Annotated[float, Field(ge=0)] = 0.0,
) -> Game:
    """The answer is a number in 0..top; a guess below it is answered `+`, above it `-`, and anything else `?`.

    The episode ends with {"found": 1} when the number is guessed, and with {"found": 0} after the last guess. A guess
    that leaves m of the n numbers that the hints before it left earns shaping * log2(n / m) / log2(top + 1). The
    metric `forgot` counts guesses that the hints before them had excluded, and replies that are no number.

    Args:
        top: the largest number.
        guesses: how many there are.
        shaping: sum of what the guesses earn, apart from finding the number, if they find it.
    """
    low, high, number = 0, top, int(answer)
    reply = yield None
    for left in reversed(range(guesses)):
        said = int(reply) if reply.strip().isdecimal() else -1
        if said == number:
            return {"found": 1.0}
        if left == 0:
            break
        before, forgot = high - low + 1, float(not low <= said <= high)
        if low <= said < number:
            low = said + 1
        elif number < said <= high:
            high = said - 1
        earned = shaping * log2(before / (high - low + 1)) / log2(top + 1)
        hint = "?\n" if said < 0 else "+\n" if said < number else "-\n"
        reply = yield Say(hint, reward=earned, metrics={"forgot": forgot})
    return {"found": 0.0}
