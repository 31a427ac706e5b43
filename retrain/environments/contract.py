"""What an environment reads, yields and returns. Needs nothing but the standard library, as its workers do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsFloat

from retrain.errors import ComponentError
from retrain.types import fits_float32

FIELDS: tuple[str, ...] = ("answer", "prompt", "problem", "extra", "rng", "seed", "limits")
"""What an environment may read by naming it: `answer`, `prompt` and `extra` are the problem's and `problem` a dict of
them with its id; `rng` is a `random.Random` made from `seed`, which all episodes of a group share; `limits` are the
episode's `Limits`."""


_REPORTED = {"turns", "replayed", "observation_tokens", "episodes", "reward", "accuracy"}
"""Metrics of episodes that no environment counts."""

Game = Generator["str | Say | Sequence[Mapping[str, str]] | None", "Reply", "float | Mapping[str, float] | None"]
"""What an environment is: it yields what it says, is sent the model's reply, and returns the reward."""


@dataclass(frozen=True, slots=True)
class Say:
    """What an environment yields to say more than a text.

    Attributes:
        text: for the model; None says nothing.
        reward: what the reply before it earned.
        role: of the message in a chat: "user", or "tool" for the result of a call.
        metrics: counts, which the episode's metrics add up.
        tools: before the first reply, JSON schemas of what the model may call, for chat templates that show them.
        tools_text: is added to the text where the chat template shows no tools.
    """

    text: str | None = None
    reward: float = 0.0
    role: str = "user"
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    tools: Sequence[Mapping[str, Any]] = ()
    tools_text: str = ""


class Reply(str):
    """What the model said in one turn: its text, without special tokens.

    Attributes:
        finish_reason: "stop", or "length" where it was cut.
        turn: number of the turn, from 0.
        tokens_left: tokens that the episode may still sample.
    """

    finish_reason: str
    turn: int
    tokens_left: int

    def __new__(cls, text: str, finish_reason: str = "stop", turn: int = 0, tokens_left: int = 0) -> Reply:
        reply = super().__new__(cls, text)
        reply.finish_reason, reply.turn, reply.tokens_left = finish_reason, turn, tokens_left
        return reply


class Limits(NamedTuple):
    """Of an episode: `[environment] max_turns, turn_tokens, observation_tokens` and `[training] max_tokens`."""

    max_turns: int
    turn_tokens: int
    observation_tokens: int
    max_tokens: int


class Answer(NamedTuple):
    """What came of one step of an episode, as plain data.

    Attributes:
        kind: "say", "end", or why the episode failed: "error" or "timeout".
        messages: (role, text) for the model, in order.
        reward: what the last reply earned.
        parts: what the environment returned: its rewards by name; None for no opinion.
        metrics: counts to add to the episode's.
        detail, trace: of a failure.
        tools, tools_text: see `Say`.
    """

    kind: str
    messages: Sequence[tuple[str, str]] = ()
    reward: float = 0.0
    parts: Mapping[str, float] | None = None
    metrics: Mapping[str, float] = {}
    detail: str = ""
    trace: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    tools_text: str = ""


def fields_read(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """The FIELDS that an environment names; ComponentError if it wants something else."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [one for one in inspect.signature(function).parameters.values() if one.kind in kinds]
    unknown = [one.name for one in wanted if one.name not in FIELDS and one.default is one.empty]
    fix = f"name its parameters among: {', '.join(FIELDS)}; those of its table stand behind a *"
    if unknown:
        raise ComponentError(f'environment "{name}" reads {", ".join(unknown)}, which no episode has', fix)
    if any(one.kind is one.POSITIONAL_ONLY for one in wanted):
        raise ComponentError(f'environment "{name}" has positional-only parameters', "remove the / of its signature")
    return tuple(one.name for one in wanted if one.name in FIELDS)


def said(value: Any, first: bool) -> Answer:
    """What an environment yielded; ValueError if that is nothing it may yield."""
    say = value if isinstance(value, Say) else Say(value) if value is None or isinstance(value, str) else None
    if say is None:
        return Answer("say", [_message(one) for one in _list(value)])
    if say.text is not None and not isinstance(say.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"Say was given a text that is {type(say.text).__name__}")
    reward = _number(say.reward, "the reward of Say")
    if first and reward:
        raise ValueError("gave a reward before the first reply")
    metrics = {str(key): _number(number, f"metric {key!r}") for key, number in say.metrics.items()}
    if taken := [key for key in metrics if key in _REPORTED or key.startswith("ended_")]:
        raise ValueError(f"metric {taken[0]!r}: the run reports env/{taken[0]} itself; give it another name")
    messages = [] if say.text is None else [(str(say.role), say.text)]
    return Answer(
        "say", messages, reward, None, metrics, "", "", [dict(tool) for tool in say.tools], str(say.tools_text)
    )


def returned(value: Any) -> Answer:
    """What an environment returned; ValueError if that is no reward."""
    if value is None:
        return Answer("end")
    parts: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"env": value}
    if not parts:
        raise ValueError("returned an empty mapping; return None to leave the reward to [[rewards]]")
    return Answer("end", parts={str(key): _number(number, f"reward {key!r}") for key, number in parts.items()})


def _list(value: Any) -> Sequence[Any]:
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return value
    raise ValueError(f"yielded a {type(value).__name__}; yield text, Say(...), messages or None")


def _message(value: Any) -> tuple[str, str]:
    match value:
        case {"role": str(role), "content": str(content)}:
            return role, content
        case _:
            raise ValueError('yielded a message that is not {"role": ..., "content": text}')


def _number(value: Any, what: str) -> float:
    number = float(value) if isinstance(value, SupportsFloat) else math.nan  # numpy's bool is no Real
    if not fits_float32(number):
        raise ValueError(f"{what} is not a finite number: {type(value).__name__}")
    return number
