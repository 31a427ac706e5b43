"""What runs in an environment worker: the live episodes, each a generator. Needs nothing but the standard library,
so that the interpreter of `[environment] python` can run it with the environment's own dependencies."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from random import Random
from typing import Any, NamedTuple

import retrain
from retrain.environments.contract import Answer, Limits, Reply, fields_read, returned, said
from retrain.errors import ComponentError
from retrain.system.worker_process import limit, serve

_LONGEST = 1 << 16
"""Characters of a message: an answer must fit into a line."""

_TRAITS = "__retrain_environment__"


class Hello(NamedTuple):
    """An environment that a worker is to hold; the first call has one for every label of `[[environments]]`.

    Attributes:
        name, target: of the environment; the target is a path `module:object` or `module.object`.
        params: its keyword-only parameters.
        search_paths: where modules are looked up first.
        traits: see `Worlds`; those that are known.
    """

    name: str
    target: str
    params: Mapping[str, Any]
    search_paths: tuple[str, ...]
    timeout_s: float
    limits: tuple[int, int, int, int]
    traits: Mapping[str, bool] = {}


class Worlds:
    """Live episodes by number, each a generator of its own.

    Attributes:
        traits: what each environment's decorator states: `replay` and `rewards`, both True unless it says otherwise.
        reads: what each environment reads of an episode, by its parameters (see `FIELDS`).
    """

    def __init__(self, hellos: Mapping[str, Hello]) -> None:
        self._games: dict[str, Callable[[Mapping[str, Any]], Generator[Any, Any, Any]]] = {}
        self._live: dict[int, Generator[Any, Any, Any]] = {}
        self.traits: dict[str, dict[str, bool]] = {}
        self.reads: dict[str, tuple[str, ...]] = {}
        for label, hello in hellos.items():
            target = load(hello)
            self._games[label], self.reads[label] = _game(hello, target)
            self.traits[label] = {"replay": True, "rewards": True, **getattr(target, _TRAITS, {}), **hello.traits}

    def call(self, body: tuple[Any, ...]) -> Answer:
        """Do one step: ("open", key, problem, seed), ("reply", key, *arguments of `Reply`) or ("finish",)."""
        match body:
            case ("open", int(key), problem, int(seed)):
                return self._step(key, lambda: next(self._open(key, problem, seed)), first=True)
            case ("reply", int(key), *arguments):
                return self._step(key, lambda: self._live[key].send(Reply(*arguments)), first=False)
            case _:
                return self._finish()

    def _open(self, key: int, problem: Mapping[str, Any], seed: int) -> Generator[Any, Any, Any]:
        problem = copy.deepcopy(problem)  # what an episode changes in it is its own
        known = {"problem": problem, "rng": Random(seed), "seed": seed}
        known |= {name: problem[name] for name in ("answer", "prompt", "extra") if name in problem}
        self._live[key] = self._games[problem.get("environment", "")](known)
        return self._live[key]

    def _step(self, key: int, step: Callable[[], Any], first: bool) -> Answer:
        """An episode that ends, or whose environment fails, is not live any more."""
        try:
            try:
                answer = said(step(), first)
                texts = [(_cut(role), _cut(text)) for role, text in answer.messages]
                return answer._replace(messages=texts, tools_text=_cut(answer.tools_text))
            except StopIteration as stop:
                del self._live[key]
                if first:
                    raise ValueError("returned before the model said anything") from None
                return returned(stop.value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if (game := self._live.pop(key, None)) is not None:
                _close(game)
            return _failure(error)

    def _finish(self) -> Answer:
        for game in self._live.values():
            _close(game)
        self._live.clear()
        return Answer("end")


def load(hello: Hello) -> Any:
    """Import what an environment is; ComponentError if its parameters do not fit."""
    before, places = list(sys.path), [os.getcwd(), *hello.search_paths] if _is_users(hello) else []
    sys.path[:0] = places
    path, _, name = hello.target.replace(":", ".").rpartition(".")
    target: Any = attrgetter(name)(importlib.import_module(path))
    sys.path[:] = before + [place for place in places if place not in before]
    _check_table(hello, target)
    return target


def _is_users(hello: Hello) -> bool:
    """Whether the environment, or a parameter of it, names code outside of this package.

    Only then is the current directory searched: it may be a run of somebody else.
    """
    values = (value if isinstance(value, list | tuple) else [value] for value in hello.params.values())
    names = [hello.target, *(one for several in values for one in several if isinstance(one, str))]
    return any(("." in name or ":" in name) and not name.startswith("retrain.") for name in names)


def shown(problem: Mapping[str, Any], reads: Sequence[str]) -> dict[str, Any]:
    """The facts of a problem for an environment that reads these fields: what it does not read cannot leave it."""
    named = (*reads, "environment")
    return {name: value for name, value in problem.items() if "problem" in reads or name in named}


def _game(hello: Hello, target: Any) -> tuple[Callable[[Mapping[str, Any]], Generator[Any, Any, Any]], tuple[str, ...]]:
    """What begins an episode of an environment from what is known of it, and the fields that it reads."""
    built: Any = target(**hello.params) if inspect.isclass(target) else target
    params = {} if built is not target else hello.params
    reads, limits = fields_read(hello.name, built), Limits(*hello.limits)
    return lambda known: built(**{name: {**known, "limits": limits}[name] for name in reads}, **params), reads


def _stand_in(name: str, **traits: Any) -> Callable[[Any], Any]:
    def mark(target: Any) -> Any:
        setattr(target, _TRAITS, {key: bool(traits[key]) for key in ("replay", "rewards") if key in traits})
        return target

    return mark


def _check_table(hello: Hello, target: Callable[..., Any]) -> None:
    """What a schema checks where this interpreter and the run's are the same."""
    table = {p.name: p.default for p in inspect.signature(target).parameters.values() if p.kind is p.KEYWORD_ONLY}
    lacking = [name for name, default in table.items() if default is inspect.Parameter.empty]
    wrong = [name for name in lacking if name not in hello.params] + [
        name for name in hello.params if name not in table
    ]
    if wrong:
        takes = ", ".join(table) or "no parameters"
        raise ComponentError(f'environment "{hello.name}": {", ".join(wrong)}: missing or unknown', f"it takes {takes}")
    if not inspect.isgeneratorfunction(vars(target)["__call__"] if inspect.isclass(target) else target):
        raise ComponentError(f'environment "{hello.name}" is no generator', "`reply = yield text` asks the model")


def start(hellos: Mapping[str, tuple[Any, ...]]) -> tuple[Any, Callable[[Any], Any] | None]:
    """Load the environments. A call is what `Worlds.call` takes, its answer an `Answer`."""
    known = {label: Hello(*hello) for label, hello in hellos.items()}
    timeout_s = max(hello.timeout_s for hello in known.values())
    # A decorator has nothing to register here, and the registry needs libraries that an interpreter may not have.
    setattr(retrain, "environment", _stand_in)  # noqa: B010
    try:
        worlds = Worlds(known)
    except BaseException as error:
        if isinstance(error, ComponentError):
            return ["refused", error.problem, error.fix, error.trace], None
        return ["raised", f"{type(error).__name__}: {error}"[:500], "", traceback.format_exc()[-4000:]], None

    def call(body: tuple[Any, ...]) -> Answer:
        # Should the parent be unable to kill it, the worker dies of its own CPU time.
        limit(resource.RLIMIT_CPU, int(time.process_time() + 2 * timeout_s) + 10)
        return worlds.call(body)

    return ["ready", worlds.traits, worlds.reads], call


def _close(game: Generator[Any, Any, Any]) -> None:
    with suppress(BaseException):
        game.close()


def _cut(text: str) -> str:
    """Long text without its middle; tokens are counted, and more is cut, where they are known.

    A half of a surrogate pair, which no tokenizer and no file takes, becomes U+FFFD.
    """
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}\n[...]\n{text[-_LONGEST // 2 :]}"


def _failure(error: BaseException) -> Answer:
    with suppress(Exception):
        detail = " ".join(_cut(f"{type(error).__name__}: {error}").split())[:300]
        return Answer("error", detail=detail, trace=_cut(traceback.format_exc()[-4000:]))
    return Answer("error", detail=type(error).__name__)


if __name__ == "__main__":
    serve(start)
