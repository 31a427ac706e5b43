"""Episodes as plain text, without tokenization, so that they can be played without a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain.environments.env_pool import EnvPool
from retrain.system import event_loop


def text_episode(
    pool: EnvPool, problem: Mapping[str, Any], seed: int, replies: Iterator[str], most: int
) -> Iterator[tuple[str, str]]:
    """Play an episode with given replies.

    Args:
        pool: the environment's workers.
        problem: fields of the problem by name.
        seed: of the episode.
        replies: actions; the iteration stops without a last item when they are used up.
        most: `tokens_left` that every action reports to the environment.
    Yields:
        ("environment", observation) and ("reward", reward of an action); at last ("ended", summary)
        or ("failed", reason).
    """
    env = pool.env(problem.get("environment", ""), 0)
    answer, turn, earned = event_loop.run(env.reset(problem, seed)), 0, 0.0
    while answer.kind == "say":
        if text := "".join([*(text for _, text in answer.messages), answer.tools_text]):
            yield "environment", text
        if (reply := next(replies, None)) is None:
            return
        answer = event_loop.run(env.step(reply, "stop", turn, most))
        turn, earned = turn + 1, earned + answer.reward
        yield from [("reward", f"{answer.reward:g}")] if answer.reward else []
    if answer.kind != "end":
        yield "failed", f"after {turn} turns: {answer.detail or answer.kind}"
        return
    yield "ended", ending(turn, "end", None if answer.parts is None else sum(answer.parts.values()) + earned)


def ending(turns: int, how: str, reward: float | None) -> str:
    """Describe how an episode ended. An episode without reward is scored by `[[rewards]]`."""
    return f"after {turns} turns: {how}; reward {'left to [[rewards]]' if reward is None else f'{reward:g}'}"
