"""The main loop of a reward worker: load rewards, call them, turn results into replies."""

from __future__ import annotations

import asyncio
import reprlib
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, cast

from retrain.errors import ComponentError
from retrain.registry.call import described, own_frames
from retrain.registry.component import Component
from retrain.registry.lookup import load_object
from retrain.rewards.signatures import GROUP, Form, form_of
from retrain.system.worker_process import limit, serve
from retrain.types import fits_float32


class RewardResult(NamedTuple):
    """Result of one completion: `status` as in `Score`; `value` None without an opinion or on failure."""

    status: str
    value: float | None = None
    parts: Mapping[str, float] = {}
    detail: str = ""
    trace: str = ""


class Settings(NamedTuple):
    """The first call to a worker.

    Attributes:
        rewards: (name, dotted path of the target, parameters) of each.
        search_paths: where dotted paths are looked up.
        timeout_s: of a call, and of each coroutine in it.
        is_async: the rewards are coroutine functions.
    """

    rewards: tuple[tuple[str, str, Mapping[str, Any]], ...]
    search_paths: tuple[str, ...]
    timeout_s: float
    is_async: bool = False


class LoadedReward(NamedTuple):
    """A reward that can be called. A coroutine finds the same event loop at every call."""

    name: str
    function: Callable[..., Any]
    form: Form
    timeout_s: float
    runner: asyncio.Runner


def size(items: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of completions in the items of a call: an item is one, or a group of them."""
    return sum(len(item[GROUP]) if GROUP in item else 1 for item in items)


def start(hello: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any] | None]:
    """Load the rewards. A call is (number of the reward, completions); its answer is a list of `RewardResult`."""
    settings = Settings(*hello)
    try:
        rewards = [load(*reward, settings) for reward in settings.rewards]
    except BaseException as error:
        if isinstance(error, ComponentError):
            return ["refused", error.problem, error.fix, error.trace], None
        return ["raised", described(error), "", own_frames(error)], None

    def call(body: tuple[int, Sequence[Mapping[str, Any]]]) -> list[RewardResult]:
        # The CPU limit ends the worker if its parent cannot kill it.
        limit(resource.RLIMIT_CPU, int(time.process_time() + 2 * settings.timeout_s) + 10)
        return evaluate(rewards[body[0]], body[1])

    return ["ready"], call


def load(name: str, target: str, params: Mapping[str, Any], settings: Settings) -> LoadedReward:
    """The reward at the dotted path `target`, its parameters filled in; a class is built here, once."""
    component = Component("reward", name, load_object(target, settings.search_paths), name)
    bound = component.bind(params)
    function = bound.build({}) if component.stateful else partial(component.target, **bound.arguments)
    return LoadedReward(name, function, form_of(component), settings.timeout_s, asyncio.Runner())


def evaluate(reward: LoadedReward, items: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
    """Score completions and return the reply for each; a single one if the whole call fails."""
    if reward.form.is_async:
        return reward.runner.run(_gathered(reward, items))
    try:
        return _checked(reward, reward.function(**reward.form.arguments(items)), size(items))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return [_raised(reward, error)]


async def _gathered(reward: LoadedReward, items: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
    """The replies of coroutines that run together, each of one item, or of all if it takes a batch."""
    together = [items] if reward.form.batch else [[item] for item in items]
    return [reply for found in await asyncio.gather(*(_awaited(reward, some) for some in together)) for reply in found]


async def _awaited(reward: LoadedReward, items: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
    limit_ = asyncio.timeout(reward.timeout_s)
    try:
        async with limit_:
            return _checked(reward, await reward.function(**reward.form.arguments(items)), size(items))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        late = f"{reward.name} took longer than {reward.timeout_s:g} s"
        failed = RewardResult("timeout", detail=late) if limit_.expired() else _raised(reward, error)
        return [failed] * size(items)


def _raised(reward: LoadedReward, error: BaseException) -> RewardResult:
    with suppress(MemoryError):
        return RewardResult("error", detail=f"{reward.name} raised {described(error)}", trace=own_frames(error))
    return RewardResult("error", detail=f"{reward.name} raised {type(error).__name__}")


def _checked(reward: LoadedReward, found: Any, count: int) -> list[RewardResult]:
    """Turn the return value of a reward into replies."""
    if not reward.form.batch and reward.form.name != "group":
        return [_score(reward.name, found)]
    values: Any = found.tolist() if hasattr(type(found), "tolist") else found
    if not isinstance(values, list | tuple) or len(cast("list[Any]", values)) != count:
        expected = f"expected a list of {count}, one for each completion"
        return [RewardResult("invalid", detail=f"{reward.name} returned {_shown(found)}; {expected}")]
    return [_score(reward.name, value) for value in cast("list[Any]", values)]


def _score(name: str, value: Any) -> RewardResult:
    """A score, or a dict with one: its other numbers are parts that are recorded."""
    if value is None:
        return RewardResult("ok")
    if isinstance(value, Mapping):
        named = {
            str(key): number
            for key, one in cast("Mapping[Any, Any]", value).items()
            if (number := _number(one)) is not None
        }
        score = named.pop("score", None)
        return invalid(name, value) if score is None else RewardResult("ok", score, named)
    number = _number(value)
    return invalid(name, value) if number is None else RewardResult("ok", number)


def _number(value: Any) -> float | None:
    """A number that is finite in float32, as a float; else None."""
    with suppress(OverflowError):
        if isinstance(value, Real) and fits_float32(number := float(value)):
            return number
    return None


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def invalid(name: str, value: Any) -> RewardResult:
    """The reply for a result that is not a score."""
    wanted = 'a "score" that is a finite number' if isinstance(value, Mapping) else "one finite number or None"
    return RewardResult("invalid", detail=f"{name} returned {_shown(value)}; expected {wanted}")


if __name__ == "__main__":
    serve(start)
