"""Walk to a goal in five to ten turns, with a reward in each turn for getting closer."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from retrain.environments.contract import EpisodeGenerator, Observation, environment


@environment("grid")
def grid(
    answer: str, *, steps: Annotated[int, Field(ge=1)] = 8, shaping: Annotated[float, Field(ge=0)] = 1.0
) -> EpisodeGenerator:
    """Grid walk: the actions `n`, `s`, `e` and `w` move one step, any other action does not move.

    The problem's answer, such as `3 -2`, is the offset of the goal to the east and north. Each
    observation is the remaining offset. The episode ends at the goal with the reward {"reached": 1},
    or after `steps` steps with {"reached": 0}. Each step earns shaping * (decrease of the distance) /
    (distance at the start); the last one earns it as the reward "nearer".

    Args:
        steps: largest number of steps of an episode.
        shaping: sum of the step rewards of an episode that reaches the goal, without `reached`.
    """
    east, north = map(int, answer.split())
    start = distance = abs(east) + abs(north)
    action = yield None
    for left in reversed(range(steps)):
        east -= (action.strip() == "e") - (action.strip() == "w")
        north -= (action.strip() == "n") - (action.strip() == "s")
        if (east, north) == (0, 0):
            return {"reached": 1.0, "nearer": shaping * distance / start}
        nearer = distance - abs(east) - abs(north)
        distance -= nearer
        # The last step has no observation after it that could carry its reward.
        if left == 0:
            return {"reached": 0.0, "nearer": shaping * nearer / start}
        action = yield Observation(f"{east} {north}:", reward=shaping * nearer / start)
