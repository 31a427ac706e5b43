"""Guess a number from hints, with an optional reward in each turn."""

from __future__ import annotations

from math import log2
from typing import Annotated

from pydantic import Field

from retrain.environments.contract import EpisodeGenerator, Observation, environment


@environment("guess")
def guess(
    answer: str,
    *,
    top: Annotated[int, Field(ge=1)] = 63,
    guesses: Annotated[int, Field(ge=1)] = 6,
    shaping: Annotated[float, Field(ge=0)] = 0.0,
) -> EpisodeGenerator:
    """Number guessing in 0..top: the hint is `+` after a guess that is too low, `-` if too high.

    Any other action gets `?`. The episode ends with {"found": 1} when the guess is right, and with
    {"found": 0} after the last guess. A guess that reduces the n possible numbers to m has the
    reward shaping * log2(n / m) / log2(top + 1). The metric `forgot` counts guesses that earlier
    hints had excluded, and actions that are not numbers.

    Args:
        top: the largest number.
        guesses: number of guesses.
        shaping: largest sum of the guesses' rewards in an episode, without `found`.
    """
    low, high = 0, top
    number = int(answer)
    action = yield None
    for left in reversed(range(guesses)):
        # -1 is outside of every range, so it is wasted like an excluded number.
        said = int(action) if action.strip().isdecimal() else -1
        if said == number:
            return {"found": 1.0}
        # No hint after the last guess: nobody would read it.
        if left == 0:
            break
        before, forgot = high - low + 1, float(not low <= said <= high)
        # A guess outside the range reveals nothing new.
        if low <= said < number:
            low = said + 1
        elif number < said <= high:
            high = said - 1
        earned = shaping * log2(before / (high - low + 1)) / log2(top + 1)
        hint = "?\n" if said < 0 else "+\n" if said < number else "-\n"
        action = yield Observation(hint, reward=earned, metrics={"forgot": forgot})
    return {"found": 0.0}
