"""What runs in a reward worker: it loads rewards, calls them, and turns whatever comes of it into a reply."""

from __future__ import annotations

import math
import reprlib
import resource
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

from retrain.errors import ComponentError
from retrain.registry.call import described, own_frames
from retrain.registry.component import Component
from retrain.registry.lookup import load_object
from retrain.system.worker_process import limit, serve


class Reply(NamedTuple):
    """What came of one call: `status` as in `Score`; `value` None without an opinion or on failure."""

    status: str
    value: float | None = None
    detail: str = ""
    trace: str = ""


class Settings(NamedTuple):
    """The first call to a worker. `rewards` holds (name, dotted path of the target, parameters)."""

    rewards: tuple[tuple[str, str, Mapping[str, Any]], ...]
    search_paths: tuple[str, ...]
    timeout_s: float


def start(hello: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any] | None]:
    """Load the rewards. A call is (number of the reward, its arguments); its answer is a `Reply`."""
    settings = Settings(*hello)
    try:
        rewards = [(name, load(name, path, params, settings.search_paths)) for name, path, params in settings.rewards]
    except BaseException as error:
        if isinstance(error, ComponentError):
            return ["refused", error.problem, error.fix, error.trace], None
        return ["raised", described(error), "", own_frames(error)], None

    def call(body: tuple[int, Mapping[str, Any]]) -> Reply:
        # If the parent cannot kill the worker, its limit of CPU time does.
        limit(resource.RLIMIT_CPU, int(time.process_time() + 2 * settings.timeout_s) + 10)
        return evaluate(*rewards[body[0]], body[1])

    return ["ready"], call


def load(name: str, target: str, params: Mapping[str, Any], search_paths: tuple[str, ...]) -> Callable[..., Any]:
    """The reward at the dotted path `target`, its parameters filled in; a class is built here, once."""
    component = Component("reward", name, load_object(target, search_paths), name)
    bound = component.bind(params)
    if component.stateful:
        return bound.build({})
    return partial(component.target, **bound.arguments)


def evaluate(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Reply:
    """Call a reward; whatever it raises or returns becomes a reply."""
    try:
        return _checked(name, function(**arguments))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        with suppress(MemoryError):
            return Reply("error", None, f"{name} raised {described(error)}", own_frames(error))
        return Reply("error", None, f"{name} raised {type(error).__name__}")


def _checked(name: str, value: Any) -> Reply:
    if value is None:
        return Reply("ok")
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    return Reply("ok", number) if math.isfinite(number) else invalid(name, value)


def invalid(name: str, value: Any) -> Reply:
    """The reply for a result that is not a score."""
    shown = f"{reprlib.repr(value)} ({type(value).__name__})"
    return Reply("invalid", None, f"{name} returned {shown}; expected one finite number or None")


if __name__ == "__main__":
    serve(start)
