"""Components (functions or classes whose signatures define their interfaces) and the kinds that register them."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Generic, Literal, ParamSpec, TypeVar, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError

from retrain.errors import ComponentError, MissingExtraError
from retrain.registry.call import Call
from retrain.registry.traits import LossTraits, Traits, TransformTraits, check_names

Contract = Literal["columns", "lists", "context"]
PLAIN_READS: Mapping[str, tuple[str, ...]] = {
    "lists": ("rewards", "group_ids"),
    "context": (
        *("rewards", "lengths", "correct", "group_ids", "input_ids", "response_mask"),
        *("sampler_logprobs", "planning_mask", "sepa_lambda", "step"),
    ),
}
"""Calling convention of a plain function -> the columns from which its arguments are made."""
F = TypeVar("F", bound=Callable[..., Any])
P = ParamSpec("P")
T_co = TypeVar("T_co", bound=Traits, covariant=True)
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)
OPEN = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


KINDS: dict[str, Kind[..., Traits]] = {}
"""Name -> kind, in the order of `retrain.registry.kinds`."""

REGISTERED: dict[tuple[str, str], Component] = {}
"""(kind, name) -> component, in order of registration."""

MARK = "__retrain_component__"
"""Name of the attribute in which a decorated object stores its component, so that a dotted path keeps its traits."""


class ParameterError(ComponentError):
    """Error for invalid parameters of a component; `error` has the details."""

    def __init__(self, component: Component, error: ValidationError) -> None:
        self.error = error
        faults = "; ".join(f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
        takes = ", ".join(component.schema.model_fields) or "no parameters"
        super().__init__(f'{component.kind} "{component.name}": {faults}', f"it takes {takes}")


@dataclass(frozen=True)
class Component:
    """A component, registered or given by a dotted path. A function can be called, a class can be built.

    Attributes:
        kind: name of its kind.
        name: the name by which it was found.
        target: the function, or a class whose instances are called.
        table: TOML table of its parameters; by default its name.
        contract: calling convention: "columns" (tensors by parameter name), or for undecorated
            plug-ins "lists" (`fn(rewards[, params])`, one group at a time) or "context" (`fn(ctx)`).
        stated: traits from the decorator; None for an undecorated function or class.
        source: "built-in", "registered", "entry point" or "dotted path".
        params: the validated parameters; empty before `bind`.
    """

    kind: str
    name: str
    target: Callable[..., Any]
    table: str
    contract: Contract = "columns"
    stated: Traits | None = None
    source: str = "built-in"
    # Not hashed: components are keys of dicts, and a dict has no hash.
    params: Mapping[str, Any] = field(default_factory=dict[str, Any], hash=False)

    @property
    def traits(self) -> Traits:
        """Traits of the component. `Kind.traits_of` returns them with the static type of the kind."""
        return self.stated or KINDS[self.kind].traits()

    @property
    def stateful(self) -> bool:
        """True for a class, which a run instantiates once; False for a function, which has no state."""
        return inspect.isclass(self.target)

    @property
    def has_params_table(self) -> bool:
        """True if `[algorithm.advantage_params]` and similar tables hold its parameters, beside a table of its own.

        They do for a dotted path, and for a plain function, which has no keys of its own to name.
        """
        return self.source == "dotted path" or self.contract != "columns"

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Names of the columns that it reads: the positional parameters of the function or of `__call__`."""
        if self.contract in PLAIN_READS:
            return PLAIN_READS[self.contract]
        if not inspect.isclass(self.target):
            return _positional(self.target)
        # `getattr` finds an inherited method, or else that of the metaclass, which is not a function.
        call: Any = vars(self.target).get("__call__") or getattr(self.target, "__call__", None)  # noqa: B004
        return _positional(call)[1:] if inspect.isfunction(call) else ()

    @property
    def writes(self) -> str:
        """Name of the column that credit assignment stores its result in."""
        if isinstance(self.traits, TransformTraits):
            return self.traits.writes
        return KINDS[self.kind].writes or self.name

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """Parts of the run that a class needs (policy, seed ...): the positional parameters of `__init__`."""
        return _positional(self.target) if inspect.isclass(self.target) else ()

    @cached_property
    def whole(self) -> type[Any]:
        """The class with the default methods of its protocol and, for plug-ins, with checks of its calls.

        Raises:
            ComponentError: a required method is missing, or a signature does not fit the protocol.
        """
        protocol, target = KINDS[self.kind].protocol, self.target
        assert inspect.isclass(target)
        if protocol is None:
            return target
        names = {"__module__": target.__module__, "__doc__": target.__doc__}
        whole: Any = target if protocol in target.__mro__ else type(target.__name__, (target, protocol), names)
        # Our own classes are checked by tests; plug-ins pay for checks at each call.
        if self.source == "built-in":
            return whole
        from retrain.registry.method_checks import checked

        return checked(Call(self.kind, self.name), whole, protocol)

    @cached_property
    def schema(self) -> type[BaseModel]:
        """Strict pydantic model of its keyword-only parameters.

        Unknown keys are allowed only for `**keywords` and for undecorated plug-ins.
        """
        fields: dict[str, Any] = {}
        config = STRICT
        for parameter in _signature(self.target).parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                config = OPEN
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                # pydantic writes a required field as `...`.
                default = ... if parameter.default is inspect.Parameter.empty else parameter.default
                fields[parameter.name] = (_annotation(self.target, parameter), default)
        # Every term has a weight, also one whose function does not take it.
        if isinstance(self.traits, LossTraits) and "weight" not in fields:
            fields["weight"] = (float, float(self.traits.weight))
        # A plain function takes its parameters as a dict, of which the keys are not declared.
        if self.contract != "columns":
            config = OPEN
        try:
            made = create_model(f"{self.kind}_{self.name}", __config__=config, **fields)
            # `retrain schema` needs it; a type without one is found here, with the name of the plug-in.
            if self.source != "built-in":
                made.model_json_schema()
        except PydanticUserError as error:
            raise self._untypable({name: of for name, (of, _) in fields.items()}) from error
        return made

    def _untypable(self, types: Mapping[str, Any]) -> ComponentError:
        """Return the error for parameters whose types cannot be expressed in TOML."""
        wrong = list[str]()
        # pydantic's error does not name the parameter, so each type is tried alone.
        for name, annotation in types.items():
            try:
                TypeAdapter(annotation).json_schema()
            except PydanticUserError:
                wrong.append(f"{name}: {getattr(annotation, '__name__', annotation)}")
        problem = f"{self.kind} {self.name!r}: TOML has no values for the type of parameter {', '.join(wrong)}"
        return ComponentError(problem, "annotate it with text, numbers, booleans, or lists and dicts of them")

    def takes(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of `params` that it accepts; all of them if it has `**keywords`."""
        is_open = self.schema.model_config.get("extra") == "allow"
        return {key: value for key, value in params.items() if is_open or key in self.schema.model_fields}

    def require_extra(self) -> None:
        """Raise MissingExtraError if the library named by the trait `extra` is not installed."""
        # Not imported, which may take seconds.
        if self.traits.extra and importlib.util.find_spec(self.traits.extra[0]) is None:
            raise MissingExtraError(*self.traits.extra)

    def check(self) -> None:
        """Check that a run can build and call the component.

        Raises:
            MissingExtraError: a library that it needs is not installed.
            ComponentError: its name is reserved, a method is missing, it needs a part that a run
                does not have, or it reads no column although its kind requires one.
        """
        self.require_extra()
        if self.name in KINDS[self.kind].taken:
            raise ComponentError(
                f"the run reports {self.kind}/{self.name} itself", f"give the {self.kind} another name"
            )
        assert not self.stateful or self.whole  # `whole` raises if a method is missing
        kind = KINDS[self.kind]
        if missing := [name for name in self.needs if name not in kind.parts]:
            raise ComponentError(
                f"{self.kind} {self.name!r} needs {', '.join(missing)}, which a run does not have",
                f"it can be built with: {', '.join(kind.parts) or 'keyword-only parameters'}",
            )
        if kind.must_read and not self.reads:
            raise ComponentError(f"{self.kind} {self.name!r} reads no column", "name the columns as parameters")

    def bind(self, params: Mapping[str, Any] | None = None) -> Component:
        """Validate parameters and return the component with them.

        Raises:
            ParameterError: the parameters are invalid.
        """
        try:
            model = self.schema.model_validate(dict(params or {}))
        except ValidationError as error:
            raise ParameterError(self, error) from None
        # Not `model_dump`, which would turn nested models into dicts.
        values = {name: getattr(model, name) for name in type(model).model_fields}
        # Not `replace`, after which the schema would be made again.
        bound = copy(self)
        vars(bound)["params"] = values | (model.model_extra or {})
        return bound

    @property
    def arguments(self) -> dict[str, Any]:
        """Parameters that the target accepts. The `weight` of a loss is usually not one of them."""
        takes = _signature(self.target).parameters
        return {name: value for name, value in self.params.items() if name in takes}

    @property
    def path(self) -> str:
        """Import path of the target, by which another process can load it.

        Raises:
            ComponentError: the target is defined inside a function.
        """
        if self.source == "dotted path":
            return self.name
        target = self.target
        # Such a function is called outer.<locals>.inner, which cannot be imported.
        if "<" in target.__qualname__:
            problem = f'{self.kind} "{self.name}" is defined inside a function'
            raise ComponentError(problem, "move it to the module's top level")
        return f"{target.__module__}:{target.__qualname__}"

    def __call__(self, *columns: Any) -> Any:
        """Call a function component on its columns, in the order of `reads`."""
        return self.target(*columns, **self.arguments)

    def build(self, resources: Mapping[str, Any]) -> Any:
        """Instantiate a class with parts of the run; return a bound function unchanged.

        Args:
            resources: name -> part of the run.
        Raises:
            ComponentError: this run does not have a part that the class needs.
        """
        if not self.stateful:
            return self
        missing = [name for name in self.needs if name not in resources]
        if missing:
            raise ComponentError(
                f"{self.kind} {self.name!r} needs {', '.join(missing)}, which this run does not have",
                f"it can be built with: {', '.join(sorted(resources))}",
            )
        whole = self.whole
        return whole(*(resources[name] for name in self.needs), **self.arguments)


@dataclass(frozen=True)
class Kind(Generic[P, T_co]):
    """A kind of component, used as the decorator that registers components.

    Attributes:
        name: name of the kind.
        traits: class of the traits that the decorator accepts.
        about: one line with the purpose, arguments and result, for `retrain plugins`.
        key: (section, key) of the TOML that names a component; () for kinds whose components are found by
            the name of a column.
        params: key of that section with the parameters of a component given by a dotted path.
        protocol: base class with the methods of its classes and their defaults.
        plain: calling convention of an undecorated function; see `Component.contract`.
        parts: names of the parts of the run with which its classes can be built.
        taken: reserved names; the run itself reports metrics named `kind/name`.
        must_read: components must read at least one column.
        writes: column that credit assignment stores the result in; "" for the component's own name.
        is_generator: components must be generator functions.
        is_async: components may be coroutine functions.
    """

    name: str
    traits: Callable[P, T_co]
    about: str
    key: tuple[str, str] | tuple[()] = ()
    params: str = ""
    protocol: Any = None
    plain: Contract = "columns"
    parts: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    must_read: bool = False
    writes: str = ""
    is_generator: bool = False
    is_async: bool = False

    def __post_init__(self) -> None:
        KINDS[self.name] = self

    def traits_of(self, component: Component) -> T_co:
        """Return the traits of a component of this kind."""
        assert component.kind == self.name
        return cast(T_co, component.traits)

    def __call__(self, name: str, *args: P.args, **traits: P.kwargs) -> Callable[[F], F]:
        """Return a decorator that registers a function or class under a name.

        Positional parameters of a function name the columns that it reads; keyword-only parameters are the
        keys of its TOML table. A class is instantiated once per run: the positional parameters of `__init__`
        name parts of the run (policy, tokenizer, seed ...), and those of `__call__` the columns.

        Args:
            name: the name in the TOML.
            args: further traits by position.
            traits: traits of the component; see `retrain.registry.traits`.

        Raises:
            ComponentError: no name is given, another object has it, the signature is not supported, or the
                kind has no such trait.
        """
        if callable(name):  # the decorator stands without parentheses
            raise ComponentError(f"@{self.name} needs a name", f'write @{self.name}("NAME")')
        made = cast("Callable[..., T_co]", self.traits)
        # First, because the TypeError of the constructor would not suggest a trait.
        check_names(self.name, made, traits)
        stated = made(*args, **traits)

        def decorate(target: F) -> F:
            check_signature(target, self.is_generator, self.is_async)
            registered = REGISTERED.get((self.name, name))
            # A module that is reloaded, as in a notebook, registers its components again.
            if registered is not None and _place(registered.target) != _place(target):
                raise ComponentError(
                    f"{self.name} {name!r} is registered twice: {_place(registered.target)} and {_place(target)}",
                    "rename one of them",
                )
            source = "built-in" if target.__module__.startswith("retrain.") else "registered"
            component = Component(self.name, name, target, stated.table or name, "columns", stated, source)
            REGISTERED[self.name, name] = component
            setattr(target, MARK, component)
            return target

        return decorate


def check_signature(target: Callable[..., Any], is_generator: bool = False, is_async: bool = False) -> None:
    """Check that the signature of a function or class is that of a component.

    Args:
        target: the function or class.
        is_generator: see `Kind`.
        is_async: see `Kind`.
    Raises:
        ComponentError: the signature has `*args`, which name no column; the function is not a generator
            although its kind requires one; or it is async or a generator although its kind does not allow it.
    """
    # `vars`: every class inherits a `__call__` from its metaclass.
    called: Any = vars(target).get("__call__") if inspect.isclass(target) else target
    if is_generator and not inspect.isgeneratorfunction(called):
        raise ComponentError(f"{_place(target)} is not a generator", "use `reply = yield text` to query the model")
    if not is_generator and (
        (inspect.iscoroutinefunction(called) and not is_async)
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
    """Return the annotation of a keyword-only parameter; a string is evaluated in the module that contains it."""
    annotation = parameter.annotation
    if annotation is inspect.Parameter.empty:
        return Any
    if not isinstance(annotation, str):
        return annotation
    function: Any = getattr(target, "__init__") if inspect.isclass(target) else inspect.unwrap(target)  # noqa: B009
    scope = function.__globals__
    if inspect.isclass(target) and is_dataclass(target):  # an inherited field may be annotated in another module
        owner = next(base for base in target.__mro__ if parameter.name in inspect.get_annotations(base))
        scope = vars(sys.modules[owner.__module__])
    # One annotation by itself: those of columns may name tensors that only a type checker imports.
    holder = SimpleNamespace(__annotations__={parameter.name: annotation})
    try:
        return get_type_hints(holder, scope, include_extras=True)[parameter.name]
    except Exception as error:
        name = getattr(target, "__name__", repr(target))
        raise ComponentError(
            f"{name}: the type of parameter {parameter.name!r} cannot be read ({error})",
            "import the names in its annotation at run time, not under TYPE_CHECKING",
        ) from error
