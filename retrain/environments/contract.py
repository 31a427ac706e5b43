"""Interface of environments: the fields that they read, and the values that they yield and return.

This module uses only the standard library, so that any interpreter can run it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple, SupportsFloat, TypeVar

from retrain.errors import ComponentError
from retrain.types import REWARD_RANGE, fits_float32, is_reward

T = TypeVar("T", bound=Callable[..., Any])

FIELDS: tuple[str, ...] = ("answer", "prompt", "problem", "extra", "rng", "seed", "limits")
"""Names of the positional parameters that an environment may have. `answer`, `prompt` and `extra` are
fields of the problem; `problem` is a dict of all its fields. `rng` is a `random.Random` with the seed
`seed`, which is the same for all episodes of a group. `limits` are the episode's `Limits`."""


TRAITS = "__retrain_environment__"
"""Attribute of an environment with the traits that its decorator states, in a worker."""

in_worker = False
"""True in a worker of environments, which registers nothing."""

_REPORTED = {"turns", "replayed", "observation_tokens", "episodes", "reward", "accuracy"}
"""Names of episode metrics that the run reports; environments cannot use them."""

EpisodeGenerator = Generator[
    "str | Observation | Sequence[Mapping[str, str]] | None", "Action", "float | Mapping[str, float] | None"
]
"""Type of an episode: yields observations, receives actions, and returns the reward."""


def environment(name: str, **traits: Any) -> Callable[[T], T]:
    """Register an environment of this package; in a worker store its traits in it instead."""
    if not in_worker:
        from retrain.registry.kinds import environment as kind

        return kind(name, **traits)

    def mark(target: T) -> T:
        # Only these two matter in a worker; the others need libraries that it may not have.
        setattr(target, TRAITS, {key: bool(traits[key]) for key in ("replay", "rewards") if key in traits})
        return target

    return mark


@dataclass(frozen=True, slots=True)
class Observation:
    """An observation with fields besides its text, which an environment can yield instead of a str.

    Attributes:
        text: text for the model; None for no text.
        reward: reward of the previous action.
        role: role of the chat message: "user", or "tool" for the result of a tool call.
        metrics: numbers by name; the run reports their sums over the episode.
        tools: JSON schemas of the tools, before the first action; used by chat templates that
            support tools.
        tools_text: description of the tools, added to the text if the chat template does not support tools.
        state: name of the environment's state, for advantages that compare turns in equal states.
            None: the text is the name.
    """

    text: str | None = None
    reward: float = 0.0
    role: str = "user"
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    tools: Sequence[Mapping[str, Any]] = ()
    tools_text: str = ""
    state: str | None = None


class Action(str):
    """The model's text of one turn, without special tokens.

    Attributes:
        finish_reason: "stop", or "length" if a token limit cut the text.
        turn: number of the turn, from 0.
        tokens_left: number of tokens that the model may still sample in this episode.
    """

    finish_reason: str
    turn: int
    tokens_left: int

    def __new__(cls, text: str, finish_reason: str = "stop", turn: int = 0, tokens_left: int = 0) -> Action:
        action = super().__new__(cls, text)
        # A str is immutable, so its attributes are set after its creation.
        action.finish_reason, action.turn, action.tokens_left = finish_reason, turn, tokens_left
        return action


class Limits(NamedTuple):
    """Limits of an episode: keys of `[environment]`, and `[training] max_tokens`."""

    max_turns: int
    turn_tokens: int
    observation_tokens: int
    max_tokens: int


class Answer(NamedTuple):
    """Result of one step of an episode, as plain data.

    Attributes:
        kind: "observation" for an observation, "end", or a failure: "error" or "timeout".
        messages: (role, text) of the observation, in order.
        reward: reward of the last action.
        parts: rewards that the environment returned at the end, by name; None if it returned None.
        metrics: numbers to add to the metrics of the episode.
        detail, trace: message and traceback of a failure.
        tools, tools_text: see `Observation`.
        state: digest of the state's name, or of the messages if it has no name; "" if there are none.
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
    state: str = ""


def fields_read(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the FIELDS that are parameters of an environment.

    Args:
        name: name of the environment, for error messages.
        function: the environment.
    Raises:
        ComponentError: a positional parameter without a default is not in FIELDS, or a parameter is positional-only.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    wanted = [parameter for parameter in inspect.signature(function).parameters.values() if parameter.kind in kinds]
    unknown = [
        parameter.name for parameter in wanted if parameter.name not in FIELDS and parameter.default is parameter.empty
    ]
    fix = f"use parameters among: {', '.join(FIELDS)}; put keys of its TOML table after a *"
    if unknown:
        raise ComponentError(f'environment "{name}" reads {", ".join(unknown)}, which no episode has', fix)
    if any(parameter.kind is parameter.POSITIONAL_ONLY for parameter in wanted):
        raise ComponentError(f'environment "{name}" has positional-only parameters', "remove the / of its signature")
    return tuple(parameter.name for parameter in wanted if parameter.name in FIELDS)


def parse_yielded(value: Any, first: bool) -> Answer:
    """Convert the value that an environment yielded to an `Answer`.

    Args:
        value: the yielded value.
        first: True if the value precedes the first action, so that it must not have a reward.
    Raises:
        ValueError: the value is invalid.
    """
    seen = Observation(value) if value is None or isinstance(value, str) else value
    if not isinstance(seen, Observation):
        # Bytes are a sequence of numbers.
        if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
            raise ValueError(f"yielded a {type(value).__name__}; yield text, Observation(...), messages or None")
        messages = [_message(message) for message in value]
        return Answer("observation", messages, state=_digest(messages))
    if seen.text is not None and not isinstance(seen.text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"the text of Observation is of type {type(seen.text).__name__}; give a str or None")
    reward = _reward(seen.reward, "the reward of Observation")
    if first and reward:
        raise ValueError("yielded a reward before the first action; remove it")
    metrics = {
        str(key): _number(value, f"metric {key!r}", fits_float32, "a finite number")
        for key, value in seen.metrics.items()
    }
    # The run would overwrite the environment's number with its own.
    if taken := [key for key in metrics if key in _REPORTED or key.startswith("ended_")]:
        raise ValueError(f"metric {taken[0]!r}: the run reports env/{taken[0]} itself; give it another name")
    messages = [] if seen.text is None else [(str(seen.role), seen.text)]
    tools = [dict(tool) for tool in seen.tools]
    state = _digest(messages if seen.state is None else str(seen.state))
    return Answer("observation", messages, reward, None, metrics, "", "", tools, str(seen.tools_text), state)


def parse_returned(value: Any) -> Answer:
    """Convert the value that an environment returned to an `Answer`.

    Raises:
        ValueError: the value is neither a reward, a mapping of rewards, nor None.
    """
    if value is None:
        return Answer("end")
    parts: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"env": value}
    if not parts:
        raise ValueError("returned an empty mapping; return None to leave the reward to [[rewards]]")
    return Answer("end", parts={str(key): _reward(number, f"reward {key!r}") for key, number in parts.items()})


def _digest(state: str | Sequence[tuple[str, str]]) -> str:
    """Hash the name of a state, or messages, to 16 hexadecimal digits; "" if it is empty."""
    # States are only compared, and a text may be long; a lone surrogate is not valid UTF-8.
    return blake2b(repr(state).encode(errors="surrogatepass"), digest_size=8).hexdigest() if state else ""


def _message(value: Any) -> tuple[str, str]:
    match value:
        case {"role": str(role), "content": str(content)}:
            return role, content
        case _:
            raise ValueError('yielded a message that is not {"role": ..., "content": text}')


def _reward(value: Any, what: str) -> float:
    """Convert a reward to a float; raise ValueError, which names it as `what`, unless it is a number in its range."""
    return _number(value, what, is_reward, f"a number {REWARD_RANGE}")


def _number(value: Any, what: str, fits: Callable[[float], bool], kind: str) -> float:
    number = float(value) if isinstance(value, SupportsFloat) else math.nan  # numpy's bool is not a Real
    if not fits(number):
        raise ValueError(f"{what} is not {kind}: {type(value).__name__}")
    return number
