"""A component: a function or class whose signature is its interface. A kind: the decorator that registers one."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError

from retrain.errors import ComponentError, MissingExtraError
from retrain.registry.call import Call
from retrain.registry.verbs import ResultCheck, guarded, misread

Contract = Literal["columns", "lists", "context"]
F = TypeVar("F", bound=Callable[..., Any])
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
_OPEN = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


KINDS: dict[str, Kind] = {}
"""Every kind by its name, in the order of `retrain.registry.kinds`."""

REGISTERED: dict[tuple[str, str], Component] = {}
"""(kind, name) -> component, in order of registration."""

MARK = "__retrain_component__"
"""Attribute that a decorated object carries, so that its dotted path finds it with its traits."""


class Finding(NamedTuple):
    """What a component's own check, its trait `check`, says of a configuration.

    Attributes:
        at: the parameter, with the index in it if it is a list; () is the key that names the component.
        problem, fix: as in `ConfigProblem`.
        fatal: the configuration is refused; otherwise this is a warning.
        exit_code: as in `ConfigProblem`.
    """

    at: tuple[str | int, ...]
    problem: str
    fix: str
    fatal: bool = True
    exit_code: int = 2


class ParameterError(ComponentError):
    """Parameters that a component does not take; `error` has the details."""

    def __init__(self, component: Component, error: ValidationError) -> None:
        self.error = error
        faults = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        takes = ", ".join(component.schema.model_fields) or "no parameters"
        super().__init__(f'{component.kind} "{component.name}": {faults}', f"it takes {takes}")


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
        protocol, verbs, target = KINDS[self.kind].protocol, KINDS[self.kind].verbs, self.target
        assert inspect.isclass(target)
        if protocol is None:
            return target
        names = {"__module__": target.__module__, "__doc__": target.__doc__}
        whole: Any = target if protocol in target.__mro__ else type(target.__name__, (target, protocol), names)
        lacking = ", ".join(sorted(whole.__abstractmethods__))
        if wrong := f"lacks {lacking}" if lacking else misread(whole, protocol):
            raise ComponentError(
                f"{self.kind} {self.name!r} {wrong}", f"see {protocol.__name__} in retrain/protocols.py"
            )
        if verbs and self.source != "built-in":
            whole = guarded(whole, protocol, Call(self.kind, self.name), verbs)
        return whole

    @cached_property
    def schema(self) -> type[BaseModel]:
        """Pydantic model of its parameters: the keyword-only parameters, strict, unknown keys refused."""
        fields: dict[str, Any] = {}
        config = STRICT
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
        try:
            made = create_model(f"{self.kind}_{self.name}", __config__=config, **fields)
            if self.source != "built-in":
                made.model_json_schema()
        except PydanticUserError as error:
            raise self._untypable({name: of for name, (of, _) in fields.items()}) from error
        return made

    def _untypable(self, types: Mapping[str, Any]) -> ComponentError:
        """The error that names the parameters whose types no value in TOML can have."""
        wrong = list[str]()
        for name, annotation in types.items():
            try:
                TypeAdapter(annotation).json_schema()
            except PydanticUserError:
                wrong.append(f"{name}: {getattr(annotation, '__name__', annotation)}")
        problem = f"{self.kind} {self.name!r}: nothing in TOML is a value of parameter {', '.join(wrong)}"
        return ComponentError(problem, "annotate it with text, numbers, booleans, or lists and dicts of them")

    def takes(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Those of `params` that it has a parameter for: all of them if it takes any."""
        is_open = self.schema.model_config.get("extra") == "allow"
        return {key: value for key, value in params.items() if is_open or key in self.schema.model_fields}

    def require_extra(self) -> None:
        """MissingExtraError if the library that it needs, its trait `extra`, is not installed."""
        package, extra = self.traits.get("extra", ("", ""))
        if package and importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra)

    def check(self) -> None:
        """ComponentError if no run can build or call it: a library, a part of the run or its columns are missing."""
        self.require_extra()
        if self.name in KINDS[self.kind].taken:
            raise ComponentError(
                f"the run reports {self.kind}/{self.name} itself", f"give the {self.kind} another name"
            )
        assert not self.stateful or self.whole  # a verb is missing
        kind = KINDS[self.kind]
        if missing := [name for name in self.needs if name not in kind.parts]:
            raise ComponentError(
                f"{self.kind} {self.name!r} is built with {', '.join(missing)}, which is no part of a run",
                f"it can be built with: {', '.join(kind.parts) or 'keyword-only parameters'}",
            )
        if kind.must_read and self.contract == "columns" and not self.reads:
            raise ComponentError(f"{self.kind} {self.name!r} reads no column", "name the columns as parameters")

    def bind(self, params: Mapping[str, Any] | None = None) -> Bound:
        """The component with validated parameters; ParameterError if they do not fit."""
        try:
            model = self.schema.model_validate(dict(params or {}))
        except ValidationError as error:
            raise ParameterError(self, error) from None
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

    @property
    def path(self) -> str:
        """The path by which another process finds the target; ComponentError if there is none."""
        if self.component.source == "dotted path":
            return self.name
        target = self.component.target
        if "<" in target.__qualname__:
            problem = f'{self.component.kind} "{self.name}" is defined inside a function'
            raise ComponentError(problem, "move it to the module's top level")
        return f"{target.__module__}:{target.__qualname__}"

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


@dataclass(frozen=True)
class Kind:
    """One kind of component.

    Attributes:
        name: of the kind.
        about: what it is called with, and what it returns.
        key: (section, key) of the TOML that names one; none for components that a column or a default brings in.
        params: the key of that section with the parameters of a dotted path.
        protocol: what its classes may be asked for, with defaults.
        plain: how an undecorated function is called; see `Component.contract`.
        parts: parts of the run that its classes may be built with.
        verbs: methods of its classes that are guarded, with the checks of what they return.
        taken: names that no component may have, since the run reports its own figures as `kind/name`.
        must_read: whether a component without any column can do nothing.
        traits: traits that every component of the kind has unless its decorator says otherwise.
        talks: its components are generators. later: they may be coroutine functions.
    """

    name: str
    about: str
    key: tuple[str, str] | tuple[()] = ()
    params: str = ""
    protocol: Any = None
    plain: Contract = "columns"
    parts: tuple[str, ...] = ()
    verbs: Mapping[str, ResultCheck] = field(default_factory=dict[str, ResultCheck])
    taken: tuple[str, ...] = ()
    must_read: bool = False
    traits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    talks: bool = False
    later: bool = False

    def __post_init__(self) -> None:
        KINDS[self.name] = self

    def __call__(self, name: str, *, table: str | None = None, **traits: Any) -> Callable[[F], F]:
        """Register the decorated function or class under this name.

        Positional parameters name the columns it reads; keyword-only parameters are its TOML table.
        A class is built once per run: the positional parameters of `__init__` name parts of the run
        (policy, tokenizer, seed ...), and its `__call__` reads the columns.

        Args:
            name: what the TOML says.
            table: TOML table of its parameters, if not `name`.
            traits: facts for its slot, such as `writes=` of a transform or `weight=` of a loss. For every kind:
                `check=fn(params, config)` yields a `Finding` for whatever its parameters and the sections of the
                configuration (`config.training.max_tokens`) say that cannot work; it must not import torch.
                `check_files=` is the same for the files that it reads, and is called if the run uses the component.
                `check_code=` is the same for what runs code of the user's, and is called last.
                `imports=` names the parameters that are dotted paths to code of the user's, and `reaches=` maps others
                to what they reach beyond the model and the problems, such as a server: a run that somebody else trained
                may set neither unless its user trusts it.
                Of a task, `remote=True` says that its problems may have to be fetched, which `validate` does not do.

        Raises:
            ComponentError: the name is taken by another object, or the signature cannot be a component's.
        """

        def decorate(target: F) -> F:
            check_signature(target, self.talks, self.later)
            known = REGISTERED.get((self.name, name))
            if known is not None and _place(known.target) != _place(target):
                raise ComponentError(
                    f"{self.name} {name!r} is registered twice: {_place(known.target)} and {_place(target)}",
                    "rename one of them",
                )
            source = "built-in" if target.__module__.startswith("retrain.") else "registered"
            component = Component(self.name, name, target, table or name, "columns", {**self.traits, **traits}, source)
            REGISTERED[self.name, name] = component
            setattr(target, MARK, component)
            return target

        return decorate


def check_signature(target: Callable[..., Any], talks: bool = False, later: bool = False) -> None:
    """ComponentError if the target takes `*args`, for a column needs a name, or is not what its kind calls.

    Args:
        talks, later: of its kind.
    """
    called: Any = vars(target).get("__call__") if inspect.isclass(target) else target
    if talks and not inspect.isgeneratorfunction(called):
        raise ComponentError(f"{_place(target)} is no generator", "`reply = yield text` asks the model")
    if not talks and (
        (inspect.iscoroutinefunction(called) and not later)
        or inspect.isgeneratorfunction(called)
        or inspect.isasyncgenfunction(called)
    ):
        raise ComponentError(f"{_place(target)} is async or a generator", "write a function that returns its result")
    for parameter in _signature(target).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            raise ComponentError(
                f"{_place(target)} takes *{parameter.name}, which names no column",
                "name each column it reads as a positional parameter",
            )


def _place(target: Callable[..., Any]) -> str:
    return f"{target.__module__}.{target.__qualname__}"


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
    scope = function.__globals__
    if inspect.isclass(target) and is_dataclass(target):  # its `__init__` repeats what its bases wrote in their modules
        owner = next(one for one in target.__mro__ if parameter.name in inspect.get_annotations(one))
        scope = vars(sys.modules[owner.__module__])
    try:
        return eval(annotation, dict(scope))  # noqa: S307 - the user's own source, already imported
    except Exception as error:
        name = getattr(target, "__name__", repr(target))
        raise ComponentError(
            f"{name}: the type of parameter {parameter.name!r} cannot be read ({error})",
            "import the names in its annotation at run time, not under TYPE_CHECKING",
        ) from error
