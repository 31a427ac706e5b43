"""A component: a function or class whose signature is its interface."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model

from retrain.errors import ComponentError
from retrain.protocols import PROTOCOLS

KINDS: tuple[str, ...] = (
    "advantage",
    "transform",
    "algorithm",
    "uncertainty",
    "signal",
    "filter",
    "loss",
    "reduction",
    "reward",
    "task",
    "engine",
    "tracker",
    "executor",
)

Contract = Literal["columns", "lists", "context"]
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
_OPEN = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Component:
    """One registered or dotted component.

    Attributes:
        kind, name: its slot and the name it was found under.
        target: the function, or a class whose instances are called.
        table: the TOML table of its parameters (its own name unless said otherwise).
        contract: "columns" (tensors by parameter name), or for undecorated plug-ins "lists"
            (`fn(rewards[, params])`, one group at a time) and "context" (`fn(ctx)`).
        traits: facts the decorator stated, such as `writes="uncertainty"` or `weight=0.0`.
        source: "built-in", "registered", "entry point" or "dotted path".
    """

    kind: str
    name: str
    target: Callable[..., Any]
    table: str
    contract: Contract = "columns"
    traits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: str = "built-in"

    @property
    def stateful(self) -> bool:
        """A class is built once per run and keeps state; a function is pure."""
        return inspect.isclass(self.target)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Columns it is called with: the positional parameters of the function or of `__call__`."""
        if not inspect.isclass(self.target):
            return _positional(self.target)
        call: Any = vars(self.target).get("__call__") or getattr(self.target, "__call__", None)  # noqa: B004
        return _positional(call)[1:] if inspect.isfunction(call) else ()

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """Parts of the run a class is built with (policy, tokenizer, seed ...): positional in `__init__`."""
        return _positional(self.target) if inspect.isclass(self.target) else ()

    @cached_property
    def whole(self) -> type[Any]:
        """The class, with its protocol's defaults for the verbs that it leaves out; ComponentError if one has none."""
        protocol, target = PROTOCOLS.get(self.kind), self.target
        assert inspect.isclass(target)
        if protocol is None:
            return target
        names = {"__module__": target.__module__, "__doc__": target.__doc__}
        whole: Any = target if protocol in target.__mro__ else type(target.__name__, (target, protocol), names)
        if lacking := ", ".join(sorted(whole.__abstractmethods__)):
            problem = f"{self.kind} {self.name!r} lacks {lacking}"
            raise ComponentError(problem, f"see {protocol.__name__} in retrain/protocols.py")
        return whole

    @cached_property
    def schema(self) -> type[BaseModel]:
        """Pydantic model of its parameters: the keyword-only parameters, strict, unknown keys refused."""
        fields: dict[str, Any] = {}
        config = _STRICT
        for parameter in _signature(self.target).parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                config = _OPEN
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                default = ... if parameter.default is inspect.Parameter.empty else parameter.default
                fields[parameter.name] = (_annotation(self.target, parameter), default)
        if "weight" in self.traits and "weight" not in fields:
            fields["weight"] = (float, float(self.traits["weight"]))
        if self.contract != "columns":
            config = _OPEN
        return create_model(f"{self.kind}_{self.name}", __config__=config, **fields)

    def bind(self, params: Mapping[str, Any] | None = None) -> Bound:
        """The component with validated parameters; pydantic's ValidationError if they do not fit."""
        model = self.schema.model_validate(dict(params or {}))
        values = {name: getattr(model, name) for name in type(model).model_fields}
        return Bound(self, values | (model.model_extra or {}))


@dataclass(frozen=True)
class Bound:
    """A component with its parameters, ready to be called (function) or built (class)."""

    component: Component
    params: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.component.name

    @property
    def reads(self) -> tuple[str, ...]:
        return self.component.reads

    @property
    def arguments(self) -> dict[str, Any]:
        """Parameters that the target itself takes (a loss's `weight` belongs to its slot)."""
        takes = _signature(self.component.target).parameters
        return {name: value for name, value in self.params.items() if name in takes}

    def __call__(self, *columns: Any) -> Any:
        """Call a function component on its columns, in the order of `reads`."""
        return self.component.target(*columns, **self.arguments)

    def build(self, resources: Mapping[str, Any]) -> Any:
        """Build a class component from the run's parts by name, or return the bound function itself."""
        if not self.component.stateful:
            return self
        missing = [name for name in self.component.needs if name not in resources]
        if missing:
            raise ComponentError(
                f"{self.component.kind} {self.name!r} needs {', '.join(missing)}, which this run does not have",
                f"it can be built with: {', '.join(sorted(resources))}",
            )
        whole = self.component.whole
        return whole(*(resources[name] for name in self.component.needs), **self.arguments)


def _signature(target: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(target)
    except (TypeError, ValueError) as error:
        raise ComponentError(f"{target!r} has no signature to read ({error})", "use a Python function") from error


def _positional(target: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(p.name for p in _signature(target).parameters.values() if p.kind in _POSITIONAL)


def _annotation(target: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The annotation of a keyword-only parameter; strings are evaluated where the function was defined."""
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    function: Any = getattr(target, "__init__") if inspect.isclass(target) else inspect.unwrap(target)  # noqa: B009
    try:
        return eval(annotation, dict(function.__globals__))  # noqa: S307 - the user's own source, already imported
    except Exception as error:
        name = getattr(target, "__name__", repr(target))
        raise ComponentError(
            f"{name}: the type of parameter {parameter.name!r} cannot be read ({error})",
            "import the names in its annotation at run time, not under TYPE_CHECKING",
        ) from error
