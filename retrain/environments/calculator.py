"""Environment with a calculator that the model can call."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from retrain.environments.contract import EpisodeGenerator, Observation, environment

# Up to nine digits: Python refuses to make an integer of thousands of them.
_CALL = re.compile(r"=\s*(\d{1,9})\+(\d{1,9})\s*")
_FINAL = re.compile(r"so (\d{1,10})\s*")


@environment("calculator")
def calculator(answer: str, *, calls: Annotated[int, Field(ge=0)] = 3) -> EpisodeGenerator:
    """Calculator: the action `=12+34` gets the observation `46`; `so 46` submits an answer.

    A submission ends the episode with reward 1 if the answer is right, else 0. Any other action gets
    the observation `?`. The action after the last observation must be the submission.

    Args:
        calls: number of observations.
    """
    action = yield None
    for _ in range(calls):
        if final := _FINAL.fullmatch(action):
            return float(final[1] == answer)
        call = _CALL.fullmatch(action)
        text = f"{int(call[1]) + int(call[2])}\n" if call else "?\n"
        action = yield Observation(text, role="tool", metrics={"tool_calls": bool(call), "tool_errors": not call})
    final = _FINAL.fullmatch(action)
    return float(final is not None and final[1] == answer)
