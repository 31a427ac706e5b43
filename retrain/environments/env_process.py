"""Main module of an environment worker, which runs live episodes as generators.

It uses only the standard library, so that the interpreter of `[environment] python` can run it with
the environment's own dependencies.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter
from random import Random
from typing import Any, NamedTuple

from retrain.environments import contract
from retrain.environments.contract import Action, Answer, Limits, fields_read, parse_returned, parse_yielded
from retrain.errors import ComponentError
from retrain.system.worker_process import serve

_LONGEST = 1 << 16
"""Largest number of characters of a message: an answer is sent as one line of bounded length."""


class Hello(NamedTuple):
    """Settings of one environment, sent to a worker when it starts.

    Attributes:
        name: name of the environment.
        target: import path of the environment, `module:object` or `module.object`.
        params: values of its keyword-only parameters.
        search_paths: directories that are searched for modules first.
        timeout_s: timeout of a step in seconds.
        limits: fields of `Limits`.
        traits: traits that the parent process knows; they override the worker's.
    """

    name: str
    target: str
    params: Mapping[str, Any]
    search_paths: tuple[str, ...]
    timeout_s: float
    limits: tuple[int, int, int, int]
    traits: Mapping[str, bool] = {}


class LiveEpisodes:
    """Runs episodes as generators, by number.

    Args:
        hellos: settings of the environments, by the labels of `[[environments]]`.

    Attributes:
        traits: `replay` and `rewards` of each environment, by label; True by default.
        reads: fields that each environment reads, by label (see `FIELDS`).
    """

    def __init__(self, hellos: Mapping[str, Hello]) -> None:
        self._starters: dict[str, Callable[[Mapping[str, Any]], Generator[Any, Any, Any]]] = {}
        self._live: dict[int, Generator[Any, Any, Any]] = {}
        self.traits: dict[str, dict[str, bool]] = {}
        self.reads: dict[str, tuple[str, ...]] = {}
        for label, hello in hellos.items():
            target = load(hello)
            self._starters[label], self.reads[label] = _episode_starter(hello, target)
            stated: Mapping[str, bool] = getattr(target, contract.TRAITS, {})
            self.traits[label] = {"replay": True, "rewards": True, **stated, **hello.traits}

    def call(self, body: tuple[Any, ...]) -> Answer:
        """Execute a call of the parent.

        Args:
            body: ("open", key, problem, seed), ("reply", key, *arguments of `Action`) or ("close", key).
        """
        match body:
            case ("open", int(key), problem, int(seed)):
                return self._step(key, lambda: next(self._open(key, problem, seed)), first=True)
            case ("reply", int(key), *arguments):
                return self._step(key, lambda: self._live[key].send(Action(*arguments)), first=False)
            case _:
                if (episode := self._live.pop(body[1], None)) is not None:
                    _close(episode)
                return Answer("end")

    def _open(self, key: int, problem: Mapping[str, Any], seed: int) -> Generator[Any, Any, Any]:
        problem = copy.deepcopy(problem)  # an episode may modify it
        facts = {"problem": problem, "rng": Random(seed), "seed": seed}
        facts |= {name: problem[name] for name in ("answer", "prompt", "extra") if name in problem}
        self._live[key] = self._starters[problem.get("environment", "")](facts)
        return self._live[key]

    def _step(self, key: int, step: Callable[[], Any], first: bool) -> Answer:
        """Advance an episode and return the result; forget the episode if it ends or fails."""
        try:
            try:
                answer = parse_yielded(step(), first)
                texts = [(_cut(role), _cut(text)) for role, text in answer.messages]
                return answer._replace(messages=texts, tools_text=_cut(answer.tools_text))
            except StopIteration as stop:
                del self._live[key]
                if first:
                    raise ValueError("returned before the first action; yield None first") from None
                return parse_returned(stop.value)
        except KeyboardInterrupt:
            raise
        # SystemExit, too: a call of sys.exit in the user's code fails its episode only.
        except BaseException as error:
            if (episode := self._live.pop(key, None)) is not None:
                _close(episode)
            return _failure(error)


def load(hello: Hello) -> Any:
    """Import an environment.

    Raises:
        ComponentError: the environment is not a generator, or a parameter is missing or unknown.
    """
    before = list(sys.path)
    user_paths = [os.getcwd(), *hello.search_paths] if _is_users(hello) else []
    # First while the environment is imported, so that the user's module wins over a package of the same name.
    sys.path[:0] = user_paths
    path, _, name = hello.target.replace(":", ".").rpartition(".")
    target: Any = attrgetter(name)(importlib.import_module(path))
    # Last afterwards: a later import of the library must not find a file of the user's folder.
    sys.path[:] = before + [path for path in user_paths if path not in before]
    _check_table(hello, target)
    return target


def _is_users(hello: Hello) -> bool:
    """Return True if the environment, or one of its parameters, names code outside this package.

    The current directory is searched for modules only in this case, because it may contain another user's files.
    """
    lists = (value if isinstance(value, list | tuple) else [value] for value in hello.params.values())
    names = [hello.target, *(name for values in lists for name in values if isinstance(name, str))]
    return any(("." in name or ":" in name) and not name.startswith(("retrain.", "builtins.")) for name in names)


def readable_fields(problem: Mapping[str, Any], reads: Sequence[str]) -> dict[str, Any]:
    """Return only the fields of a problem that the environment reads, so that it cannot reveal others."""
    named = (*reads, "environment")
    return {name: value for name, value in problem.items() if "problem" in reads or name in named}


def _episode_starter(
    hello: Hello, target: Any
) -> tuple[Callable[[Mapping[str, Any]], Generator[Any, Any, Any]], tuple[str, ...]]:
    """Return a function that starts an episode from its fields, and the names of the fields it reads."""
    # A class is built once, with its parameters; its episodes share the instance.
    built: Any = target(**hello.params) if inspect.isclass(target) else target
    params = {} if built is not target else hello.params
    reads = fields_read(hello.name, built)
    limits = Limits(*hello.limits)
    return lambda facts: built(**{name: {**facts, "limits": limits}[name] for name in reads}, **params), reads


def _check_table(hello: Hello, target: Callable[..., Any]) -> None:
    """Raise ComponentError if a parameter is missing or unknown, or the environment is not a generator.

    The run cannot check this with a schema if the environment belongs to another interpreter.
    """
    # Positional parameters are fields of the problem, keyword-only ones are keys of the table.
    table = {p.name: p.default for p in inspect.signature(target).parameters.values() if p.kind is p.KEYWORD_ONLY}
    lacking = [name for name, default in table.items() if default is inspect.Parameter.empty]
    wrong = [name for name in lacking if name not in hello.params]
    wrong += [name for name in hello.params if name not in table]
    if wrong:
        takes = ", ".join(table) or "no parameters"
        raise ComponentError(f'environment "{hello.name}": {", ".join(wrong)}: missing or unknown', f"it takes {takes}")
    if not inspect.isgeneratorfunction(vars(target)["__call__"] if inspect.isclass(target) else target):
        raise ComponentError(
            f'environment "{hello.name}" is not a generator', "use `reply = yield text` to query the model"
        )


def start(hellos: Mapping[str, tuple[Any, ...]]) -> tuple[Any, Callable[[Any], Any] | None]:
    """Load the environments.

    Args:
        hellos: fields of `Hello` of each environment, by label.
    Returns:
        (first message to the parent, function that answers its calls). The function is None if
        loading failed; see `LiveEpisodes.call`.
    """
    # The registry needs libraries that this interpreter may not have.
    contract.in_worker = True
    # A user's module may write `from retrain import environment`, which would load the registry.
    vars(sys.modules["retrain"])["environment"] = contract.environment
    try:
        episodes = LiveEpisodes({label: Hello(*hello) for label, hello in hellos.items()})
    except BaseException as error:
        if isinstance(error, ComponentError):
            return ["refused", error.problem, error.fix, error.trace], None
        return ["raised", f"{type(error).__name__}: {error}"[:500], "", traceback.format_exc()[-4000:]], None
    return ["ready", episodes.traits, episodes.reads], episodes.call


def _close(episode: Generator[Any, Any, Any]) -> None:
    """Close an environment, and ignore its exceptions."""
    with suppress(BaseException):
        episode.close()


def _cut(text: str) -> str:
    """Remove the middle of a long text and replace lone surrogates with U+FFFD.

    Tokenizers and files reject lone surrogates. The trainer applies the limit in tokens later.
    """
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}\n[...]\n{text[-_LONGEST // 2 :]}"


def _failure(error: BaseException) -> Answer:
    """Return the answer for an exception of an environment.

    Formatting the exception runs the user's code, which may fail; then only its type is named.
    """
    with suppress(Exception):
        detail = " ".join(_cut(f"{type(error).__name__}: {error}").split())[:300]
        return Answer("error", detail=detail, trace=_cut(traceback.format_exc()[-4000:]))
    return Answer("error", detail=type(error).__name__)


if __name__ == "__main__":
    serve(start)
