"""A goal to be walked to: five to ten turns, of which each earns what it brings nearer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from retrain import Say, environment
from retrain.environments.contract import Game


@environment("grid")
def grid(answer: str, *, steps: Annotated[int, Field(ge=1)] = 8, shaping: Annotated[float, Field(ge=0)] = 1.0) -> Game:
    """The answer `3 -2` says how far east and north the goal is; `n`, `s`, `e` and `w` go a step, all else stays.

    Every step is answered with how far the goal is now. The episode ends with {"reached": 1} there, and with
    {"reached": 0} after the last step. A step earns shaping * (what it brings nearer) / (distance at the start).

    Args:
        steps: how many there are.
        shaping: sum of what the steps earn, apart from reaching the goal, if they reach it.
    """
    east, north = map(int, answer.split())
    start = distance = abs(east) + abs(north)
    reply = yield None
    for left in reversed(range(steps)):
        east -= (reply.strip() == "e") - (reply.strip() == "w")
        north -= (reply.strip() == "n") - (reply.strip() == "s")
        if (east, north) == (0, 0):
            return {"reached": 1.0, "nearer": shaping * distance / start}
        nearer, distance = distance - abs(east) - abs(north), abs(east) + abs(north)
        if left == 0:
            return {"reached": 0.0, "nearer": shaping * nearer / start}
        reply = yield Say(f"{east} {north}:", reward=shaping * nearer / start)
    return None
