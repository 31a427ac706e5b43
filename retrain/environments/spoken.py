"""An episode as plain text: nothing is tokenized, so that whoever has no model can play it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain.environments.world_pool import WorldPool


def spoken(
    pool: WorldPool, problem: Mapping[str, Any], seed: int, replies: Iterator[str], most: int
) -> Iterator[tuple[str, str]]:
    """("environment", text), ("reward", what a reply earned) and at last ("ended", how) or ("failed", why).

    If no reply is left, there is no end.

    Args:
        problem: its facts.
        most: tokens that the episode may sample, as the environment is told.
    """
    answer, turn, earned = pool.step({0: ("open", 0, problem, seed)})[0], 0, 0.0
    while answer.kind == "say":
        if text := "".join([*(text for _, text in answer.messages), answer.tools_text]):
            yield "environment", text
        if (reply := next(replies, None)) is None:
            return
        answer = pool.step({0: ("reply", 0, reply, "stop", turn, most)})[0]
        turn, earned = turn + 1, earned + answer.reward
        yield from [("reward", f"{answer.reward:g}")] if answer.reward else []
    if answer.kind != "end":
        yield "failed", f"after {turn} turns: {answer.detail or answer.kind}"
        return
    yield "ended", ending(turn, "end", None if answer.parts is None else sum(answer.parts.values()) + earned)


def ending(turns: int, how: str, reward: float | None) -> str:
    """How an episode ended, in words; no reward is left to `[[rewards]]`."""
    return f"after {turns} turns: {how}; reward {'left to [[rewards]]' if reward is None else f'{reward:g}'}"
