"""A process that calls rewards for its parent: one pipe, bounded memory, nothing of torch.

Calls arrive pickled, from the parent, which is trusted; replies go back as JSON, because what runs here is not.
"""

from __future__ import annotations

import ctypes
import json
import math
import pickle
import reprlib
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from numbers import Real
from typing import Any, NamedTuple

from retrain.errors import ComponentError
from retrain.registry.component import Component
from retrain.registry.lookup import load_object

_PR_SET_PDEATHSIG = 1


class Reply(NamedTuple):
    """What came of one call: `status` as in `Score`; `value` None without an opinion or on failure."""

    status: str
    value: float | None = None
    detail: str = ""
    trace: str = ""


class Settings(NamedTuple):
    """What the parent tells a worker first. `rewards` holds (name, dotted path of the target, parameters)."""

    rewards: tuple[tuple[str, str, Mapping[str, Any]], ...]
    search_paths: tuple[str, ...]
    timeout_s: float
    memory_mb: int


def main() -> None:
    """Serve calls until the parent closes the pipe."""
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    settings = Settings(*pickle.loads(connection.recv_bytes()))  # noqa: S301 - from the parent
    _contain(settings.memory_mb)
    try:
        rewards = [
            (name, load(name, target, params, settings.search_paths)) for name, target, params in settings.rewards
        ]
    except BaseException as error:
        if isinstance(error, ComponentError):
            _send(connection, ["refused", type(error).__name__, error.problem, error.fix, error.trace])
        else:
            _send(connection, ["raised", type(error).__name__, str(error)[:500], "", traceback.format_exc()[-4000:]])
        return
    _send(connection, ["ready"])
    with suppress(EOFError):
        while True:
            calls = pickle.loads(connection.recv_bytes())  # noqa: S301 - from the parent
            _limit_cpu(len(calls) * settings.timeout_s)
            for index, arguments in calls:
                name, function = rewards[index]
                _send(connection, evaluate(name, function, arguments))


def load(name: str, target: str, params: Mapping[str, Any], search_paths: tuple[str, ...]) -> Callable[..., Any]:
    """The reward at the dotted path `target`, its parameters filled in; a class is built here, once."""
    component = Component("reward", name, load_object(target, search_paths), name)
    bound = component.bind(params)
    if component.stateful:
        return bound.build({})
    arguments = bound.arguments
    return lambda **columns: component.target(**columns, **arguments)


def evaluate(name: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Reply:
    """Call a reward; whatever it raises or returns becomes a reply."""
    try:
        return _checked(name, function(**arguments))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        with suppress(Exception):
            detail = " ".join(f"{name} raised {type(error).__name__}: {error}".split())[:300]
            return Reply("error", None, detail, traceback.format_exc()[-4000:])
        return Reply("error", None, f"{name} raised {type(error).__name__}")


def _checked(name: str, value: Any) -> Reply:
    if value is None:
        return Reply("ok")
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if math.isfinite(number):
        return Reply("ok", number)
    shown = reprlib.repr(value)
    return Reply(
        "invalid", None, f"{name} returned {shown} ({type(value).__name__}); expected one finite number or None"
    )


def _send(connection: Connection[Any, Any], message: Any) -> None:
    connection.send_bytes(json.dumps(message).encode())


def _contain(memory_mb: int) -> None:
    """Bound memory, leave no core dump, ignore Ctrl-C (the parent decides), and die with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit(resource.RLIMIT_CORE, 0)
    if memory_mb:
        _limit(resource.RLIMIT_AS, memory_mb << 20)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_cpu(seconds: float) -> None:
    """Should the parent be unable to kill it, the worker dies of its own CPU time."""
    _limit(resource.RLIMIT_CPU, int(time.process_time() + 2 * seconds) + 10)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


if __name__ == "__main__":
    main()
