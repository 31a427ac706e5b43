"""A calculator that the model must learn to call."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field

from retrain import Say, environment
from retrain.environments.contract import Game

_CALL = re.compile(r"=\s*(\d{1,9})\+(\d{1,9})\s*")
_FINAL = re.compile(r"so (\d{1,10})\s*")


@environment("calculator")
def calculator(answer: str, *, calls: Annotated[int, Field(ge=0)] = 3) -> Game:
    """`=12+34` is answered `46`, and `so 46` ends the episode with 1 if it is the answer, else 0.

    Anything else is answered `?`. After `calls` answers the next reply is the last.

    Args:
        calls: how often it answers.
    """
    reply = yield None
    for _ in range(calls):
        if final := _FINAL.fullmatch(reply):
            return float(final[1] == answer)
        call = _CALL.fullmatch(reply)
        text = f"{int(call[1]) + int(call[2])}\n" if call else "?\n"
        reply = yield Say(text, role="tool", metrics={"tool_calls": bool(call), "tool_errors": not call})
    final = _FINAL.fullmatch(reply)
    return float(final is not None and final[1] == answer)
