"""Reward worker: load rewards, call them, and convert what they return to results."""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from functools import partial
from numbers import Real
from typing import Any, NamedTuple, cast

from retrain.errors import ComponentError
from retrain.registry.call import described, own_frames
from retrain.registry.component import Component
from retrain.registry.lookup import load_object
from retrain.rewards.signatures import GROUP, Form, form_of
from retrain.types import REWARD_RANGE, is_reward


class RewardResult(NamedTuple):
    """Result of a reward for one completion.

    Attributes:
        status: see `Score`.
        value: the score; None if the reward returned None or failed.
        parts: further numbers that the reward returned, by name.
        detail: description of the failure; "" for status "ok".
        trace: traceback of the failure.
    """

    status: str
    value: float | None = None
    parts: Mapping[str, float] = {}
    detail: str = ""
    trace: str = ""


class Settings(NamedTuple):
    """Content of the first call to a worker.

    Attributes:
        rewards: (name, dotted path, parameters) of each reward.
        search_paths: directories in which dotted paths are searched, after the current directory.
        timeout_s: time limit of a call, and of each coroutine in it.
        is_async: True if the rewards are coroutine functions.
    """

    rewards: tuple[tuple[str, str, Mapping[str, Any]], ...]
    search_paths: tuple[str, ...]
    timeout_s: float
    is_async: bool = False


class LoadedReward(NamedTuple):
    """A reward that is ready to be called. A coroutine function runs in the same event loop at every call."""

    name: str
    function: Callable[..., Any]
    form: Form
    timeout_s: float
    runner: asyncio.Runner


def size(items: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of completions in a call, whose items are completions or groups of completions."""
    return sum(len(item[GROUP]) if GROUP in item else 1 for item in items)


def start(hello: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any] | None]:
    """Load the rewards; see `retrain.system.worker_process.serve`.

    Args:
        hello: fields of `Settings`.
    Returns:
        (first message to the parent, function that answers its calls). The function is None if a reward
        cannot be loaded. A call is (index of the reward, completions); its answer is a list of
        `RewardResult`.
    """
    settings = Settings(*hello)
    try:
        rewards = [load(*reward, settings) for reward in settings.rewards]
    except BaseException as error:  # also SystemExit: a module may call sys.exit when it is imported
        if isinstance(error, ComponentError):
            return ["refused", error.problem, error.fix, error.trace], None
        return ["raised", described(error), "", own_frames(error)], None
    return ["ready"], lambda body: evaluate(rewards[body[0]], body[1])


def load(name: str, target: str, params: Mapping[str, Any], settings: Settings) -> LoadedReward:
    """Load a reward and bind its parameters. A class is instantiated here, once.

    Args:
        name: name of the reward.
        target: dotted path of the function or class.
        params: its parameters.
        settings: search paths and time limit.
    Raises:
        ComponentError: the reward cannot be loaded.
    """
    component = Component("reward", name, load_object(target, settings.search_paths), name)
    bound = component.bind(params)
    function = bound.build({}) if component.stateful else partial(component.target, **bound.arguments)
    return LoadedReward(name, function, form_of(component), settings.timeout_s, asyncio.Runner())


def evaluate(reward: LoadedReward, items: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
    """Score completions and return one result for each; the same one for all if the whole call fails."""
    if reward.form.is_async:
        return reward.runner.run(_score_concurrently(reward, items))
    try:
        return _to_results(reward, reward.function(**reward.form.arguments(items)), size(items))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return [_raised(reward, error)] * size(items)


async def _score_concurrently(reward: LoadedReward, items: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
    """Score completions concurrently: one coroutine per item, or a single one for a reward that takes a batch."""
    # One time limit per completion, so that a slow one does not fail the others.
    shares = [items] if reward.form.batch else [[item] for item in items]
    return [
        result
        for results in await asyncio.gather(*(_await_reward(reward, share) for share in shares))
        for result in results
    ]


async def _await_reward(reward: LoadedReward, items: Sequence[Mapping[str, Any]]) -> list[RewardResult]:
    """Run one coroutine with the time limit of the reward."""
    limit_ = asyncio.timeout(reward.timeout_s)
    try:
        async with limit_:
            return _to_results(reward, await reward.function(**reward.form.arguments(items)), size(items))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        late = f"{reward.name} took longer than {reward.timeout_s:g} s"
        failed = RewardResult("timeout", detail=late) if limit_.expired() else _raised(reward, error)
        return [failed] * size(items)


def _raised(reward: LoadedReward, error: BaseException) -> RewardResult:
    with suppress(MemoryError):
        return RewardResult("error", detail=f"{reward.name} raised {described(error)}", trace=own_frames(error))
    # Memory is so short that not even the message fits.
    return RewardResult("error", detail=f"{reward.name} raised {type(error).__name__}")


def _to_results(reward: LoadedReward, returned: Any, count: int) -> list[RewardResult]:
    """Convert the return value of a reward to `count` results, which are the same failure if it is invalid."""
    if not reward.form.batch and reward.form.name != "group":
        return [_to_result(reward.name, returned)]
    # An array or a tensor; this process may not have imported its library.
    values: Any = returned.tolist() if hasattr(type(returned), "tolist") else returned
    if not isinstance(values, list | tuple) or len(cast("list[Any]", values)) != count:
        expected = f"expected a list of {count}, one for each completion"
        return [RewardResult("invalid", detail=f"{reward.name} returned {_shown(returned)}; {expected}")] * count
    return [_to_result(reward.name, value) for value in cast("list[Any]", values)]


def _to_result(name: str, value: Any) -> RewardResult:
    """Convert a score, or a dict with a "score", to a result. Other numbers in the dict become its parts."""
    if value is None:
        return RewardResult("ok")
    if isinstance(value, Mapping):
        named = {
            str(key): number
            for key, inner in cast("Mapping[Any, Any]", value).items()
            if (number := _number(inner)) is not None
        }
        # What remains are the parts. A dict without a "score" says nothing of the reward.
        score = named.pop("score", None)
        if score is not None:
            return RewardResult("ok", score, named)
    elif (number := _number(value)) is not None:
        return RewardResult("ok", number)
    wanted = f'a "score" {REWARD_RANGE}' if isinstance(value, Mapping) else f"a number {REWARD_RANGE}, or None"
    return RewardResult("invalid", detail=f"{name} returned {_shown(value)}; expected {wanted}")


def _number(value: Any) -> float | None:
    """Convert a number, or an array or tensor of one element, to a float; return None if it cannot be a reward."""
    with suppress(OverflowError, TypeError, ValueError, RuntimeError):
        number = value if isinstance(value, Real | Decimal) else value.item() if hasattr(value, "item") else None
        # `item` may also return a text or a complex number.
        if isinstance(number, Real | Decimal) and is_reward(number := float(number)):
            return number
    return None


def _shown(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


if __name__ == "__main__":
    from retrain.system.worker_process import serve

    serve(start)
