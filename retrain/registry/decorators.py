"""`@advantage("name")` and its siblings put a function or class into the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from retrain.errors import ComponentError
from retrain.registry.component import KINDS, Component

F = TypeVar("F", bound=Callable[..., Any])

REGISTERED: dict[tuple[str, str], Component] = {}
"""(kind, name) -> component, in order of registration."""

MARK = "__retrain_component__"
"""Attribute that a decorated object carries, so that its dotted path finds it with its traits."""


def register(kind: str, name: str, *, table: str | None = None, **traits: Any) -> Callable[[F], F]:
    """Register the decorated function or class as the `kind` called `name`.

    Positional parameters name the columns it reads; keyword-only parameters are its TOML table.
    A class is built once per run: the positional parameters of `__init__` name parts of the run
    (policy, tokenizer, seed ...), and its `__call__` reads the columns.

    Args:
        kind: one of KINDS.
        name: what the TOML says.
        table: TOML table of its parameters, if not `name`.
        traits: facts for its slot (`writes=` of a transform, `weight=` of a loss ...).

    Raises:
        ComponentError: the name is taken by another object, or the signature cannot be a component's.
    """
    if kind not in KINDS:
        raise ComponentError(f"no kind of component is called {kind!r}", f"kinds: {', '.join(KINDS)}")

    def decorate(target: F) -> F:
        check_signature(target)
        known = REGISTERED.get((kind, name))
        if known is not None and _place(known.target) != _place(target):
            raise ComponentError(
                f"{kind} {name!r} is registered twice: {_place(known.target)} and {_place(target)}",
                "rename one of them",
            )
        source = "built-in" if target.__module__.startswith("retrain.") else "registered"
        component = Component(kind, name, target, table or name, "columns", traits, source)
        REGISTERED[kind, name] = component
        setattr(target, MARK, component)
        return target

    return decorate


def check_signature(target: Callable[..., Any]) -> None:
    """ComponentError if the target takes `*args`: a column needs a name."""
    for parameter in inspect.signature(target).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            raise ComponentError(
                f"{_place(target)} takes *{parameter.name}, which names no column",
                "name each column it reads as a positional parameter",
            )


def _place(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def advantage(name: str, **traits: Any) -> Callable[[F], F]:
    """Episode advantage: columns -> [N]."""
    return register("advantage", name, **traits)


def transform(name: str, **traits: Any) -> Callable[[F], F]:
    """Token transform: columns -> [N, T] advantages, or the column named by `writes=`."""
    return register("transform", name, **traits)


def algorithm(name: str, **traits: Any) -> Callable[[F], F]:
    """Whole algorithm, instead of advantage and transforms: columns -> [N, T] advantages."""
    return register("algorithm", name, **traits)


def uncertainty(name: str, **traits: Any) -> Callable[[F], F]:
    """Uncertainty of each sampled token: columns -> [N, T]."""
    return register("uncertainty", name, **traits)


def signal(name: str, **traits: Any) -> Callable[[F], F]:
    """A column computed on first need and called by its name: columns -> the column."""
    return register("signal", name, **traits)


def filter(name: str, **traits: Any) -> Callable[[F], F]:
    """Which rows are worth training on: columns -> [N] bool, constant over a group."""
    return register("filter", name, **traits)


def loss(name: str, *, weight: float = 1.0, **traits: Any) -> Callable[[F], F]:
    """Loss term per token: columns -> [N, T]. `weight` is the default of its `weight` key; 0 drops the term."""
    return register("loss", name, weight=weight, **traits)


def reduction(name: str, **traits: Any) -> Callable[[F], F]:
    """Weight of every token in the loss, from the whole batch's mask: columns -> [N, T]."""
    return register("reduction", name, **traits)


def reward(name: str, **traits: Any) -> Callable[[F], F]:
    """Score of one completion: `fn(completion, answer, ...)` -> float, or None for no opinion."""
    return register("reward", name, **traits)


def task(name: str, **traits: Any) -> Callable[[F], F]:
    """Source of problems: a class with the `Task` protocol."""
    return register("task", name, **traits)


def engine(name: str, **traits: Any) -> Callable[[F], F]:
    """Source of completions: a class with the `Sampler` protocol."""
    return register("engine", name, **traits)


def tracker(name: str, **traits: Any) -> Callable[[F], F]:
    """Sink of metrics: a class with `log(step, metrics)` and `close()`."""
    return register("tracker", name, **traits)


def executor(name: str, **traits: Any) -> Callable[[F], F]:
    """How a campaign's runs are executed."""
    return register("executor", name, **traits)
