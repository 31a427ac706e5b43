"""Episodes with given actions, shown as plain text without a model or a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from retrain.environments.env_pool import EnvPool
from retrain.system import event_loop


def text_episode(
    pool: EnvPool, problem: Mapping[str, Any], seed: int, replies: Iterator[str], most: int
) -> Iterator[tuple[str, str]]:
    """Run an episode with given actions.

    Args:
        pool: the environment's workers.
        problem: fields of the problem by name.
        seed: seed of the episode.
        replies: texts of the actions; the episode stops when there are no more.
        most: value of `tokens_left` in every action.
    Yields:
        ("environment", observation) and ("reward", reward of an action); at the end ("ended", summary) or
        ("failed", reason), or neither if the actions are used up before the end.
    """
    env = pool.env(problem.get("environment", ""), 0)
    answer = event_loop.run(env.reset(problem, seed))
    turn, earned = 0, 0.0
    while answer.kind == "observation":
        if text := "".join([*(text for _, text in answer.messages), answer.tools_text]):
            yield "environment", text
        if (reply := next(replies, None)) is None:
            return
        answer = event_loop.run(env.step(reply, "stop", turn, most))
        turn += 1
        earned += answer.reward
        yield from [("reward", f"{answer.reward:g}")] if answer.reward else []
    if answer.kind != "end":
        yield "failed", f"after {turn} turns: {answer.detail or answer.kind}"
        return
    yield "ended", ending(turn, "end", None if answer.parts is None else sum(answer.parts.values()) + earned)


def ending(turns: int, how: str, reward: float | None) -> str:
    """Describe the end of an episode in a phrase.

    Args:
        turns: number of turns.
        how: reason why it ended.
        reward: reward of the episode; None if `[[rewards]]` score it.
    """
    return f"after {turns} turns: {how}; reward {'left to [[rewards]]' if reward is None else f'{reward:g}'}"
