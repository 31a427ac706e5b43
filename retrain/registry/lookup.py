"""Lookup of a component by registered name, entry point or dotted path."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pydantic import BaseModel, create_model

from retrain.errors import ComponentError, did_you_mean
from retrain.registry.built_in import BUILT_IN, TABLES
from retrain.registry.call import described, own_frames
from retrain.registry.component import KINDS, MARK, REGISTERED, STRICT, Bound, Component, Contract, check_signature


@cache
def _entry_points() -> dict[str, dict[str, EntryPoint]]:
    """Return the entry points of installed packages by kind and name."""
    points = entry_points()
    return {kind: {point.name: point for point in points.select(group=f"retrain.{kind}")} for kind in KINDS}


def entry_names(kind: str) -> list[str]:
    """Return the names of the entry points of installed packages."""
    return sorted(_entry_points()[kind])


def names(kind: str) -> list[str]:
    """Return all names of components of a kind, except dotted paths."""
    return sorted({*BUILT_IN.get(kind, ()), *(name for of, name in REGISTERED if of == kind), *_entry_points()[kind]})


def is_registered(kind: str, name: str) -> bool:
    """Return True for a built-in or registered component, or an entry point that can be imported."""
    known = name in BUILT_IN.get(kind, ()) or (kind, name) in REGISTERED
    return known or _of_entry_point(kind, name) is not None


def components(kind: str | None = None, tables: Container[str] | None = None) -> list[Component]:
    """Return every registered component, and those of entry points that can be imported.

    Args:
        kind: only components of this kind.
        tables: only components whose TOML table is one of these. Entry points are then imported
            only if their name is one of these.
    """
    for of, rows in BUILT_IN.items():
        for name in rows if kind in (None, of) else ():
            if tables is None or TABLES.get(of, {}).get(name, name) in tables:
                _import_built_in(of, name)
    entered = dict[tuple[str, str], Component]()
    for of, points in _entry_points().items():
        for name in points if kind in (None, of) else ():
            if (tables is None or name in tables) and (component := _of_entry_point(of, name)):
                entered[of, name] = component
    # Sorted by module, the user's last, so that the order does not depend on the order of imports.
    every = (entered | REGISTERED).values()
    in_order = sorted(every, key=lambda one: one.target.__module__ if one.source == "built-in" else "~")
    return [one for one in in_order if kind in (None, one.kind) and (tables is None or one.table in tables)]


def _import_built_in(kind: str, name: str) -> None:
    importlib.import_module(_module(kind, name))


def _module(kind: str, name: str) -> str:
    """Return the module of a built-in component."""
    return BUILT_IN[kind][name].partition(":")[0]


def find(kind: str, name: str, search_paths: Sequence[str | Path] = ()) -> Component:
    """Return the component of this kind and name.

    Args:
        kind: one of KINDS.
        name: a registered name, an entry point's name in group `retrain.<kind>`, or a dotted path
            `pkg.mod.fn` or `pkg.mod:fn`, looked up in the current directory, `plugins/` in it, then `search_paths`.

    Raises:
        ComponentError: it does not exist (the message suggests the nearest name), its module raised an
            exception (with the traceback), or its signature does not fit the kind.
    """
    if name in BUILT_IN.get(kind, ()):
        _import_built_in(kind, name)
    if (kind, name) in REGISTERED:
        return REGISTERED[kind, name]
    if name in _entry_points()[kind]:
        return _enter(kind, name)
    if is_dotted(name):
        components()  # register all names first, so that the user's code cannot take one of them
        return _from_target(kind, name, load_object(name, search_paths), "dotted path")
    listed = f"known: {', '.join(names(kind)) or 'none'}, or a dotted path to your own"
    raise ComponentError(f'no {kind} named "{name}"', did_you_mean(name, names(kind), listed))


def _enter(kind: str, name: str) -> Component:
    """Import an entry point.

    Raises:
        ComponentError: the import fails, or it registers the name of a built-in component.
    """
    point = _entry_points()[kind][name]
    with _importing(point.value):
        target = point.load()
    for (of, known), component in REGISTERED.items():
        module = component.target.__module__
        if known in BUILT_IN.get(of, ()) and module != _module(of, known):
            problem = f"{of} {known!r} is registered twice: by {module} and {_module(of, known)}"
            raise ComponentError(problem, "rename one of them")
    registered = REGISTERED.get((kind, name))
    if registered is not None and registered.source == "built-in" and registered.target is target:
        return registered
    return _from_target(kind, name, target, "entry point")


def _of_entry_point(kind: str, name: str) -> Component | None:
    """Return the component of an entry point; None if it does not exist or its import fails."""
    if name not in _entry_points()[kind]:
        return None
    try:
        return _enter(kind, name)
    except ComponentError:
        return None


def is_dotted(name: str) -> bool:
    """Return True if a name is a dotted path to the user's code."""
    return "." in name or ":" in name


def bind(
    kind: str, name: str, params: Mapping[str, Any] | None = None, search_paths: Sequence[str | Path] = ()
) -> Bound:
    """Find a component and bind its parameters.

    Raises:
        ComponentError: as for `find`. MissingExtraError: its library is not installed.
        ParameterError: the parameters are invalid.
    """
    component = find(kind, name, search_paths)
    component.check()
    return component.bind(params)


def table_names() -> dict[str, list[Component]]:
    """Return the TOML tables of all registered components, with the components that read them."""
    tables: dict[str, list[Component]] = {}
    for component in components():
        tables.setdefault(component.table, []).append(component)
    return tables


def table_schema(readers: Sequence[Component]) -> type[BaseModel]:
    """Return the schema of a table that several components share: the union of their parameters.

    A parameter that only some of them require is optional here; `bind` reports it if it is missing.
    """
    fields: dict[str, Any] = {}
    for reader in readers:
        for key, info in reader.schema.model_fields.items():
            if info.is_required() and not all(key in other.schema.model_fields for other in readers):
                info = copy.copy(info)
                info.default = None
            fields[key] = (info.annotation, info)
    return create_model(readers[0].table, __config__=STRICT, **fields)


def load_object(path: str, search_paths: Sequence[str | Path] = ()) -> Any:
    """Import the object at a dotted path `pkg.mod.attr` or `pkg.mod:attr`, which runs the user's code.

    Raises:
        ComponentError: the path is malformed, its module cannot be imported, or has no such attribute.
    """
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if not module_name or not all(part.isidentifier() for part in f"{module_name}.{attribute}".split(".")):
        raise ComponentError(f'"{path}" is not a dotted path', "write it as package.module.function")
    # For this package's modules the current directory is not searched: it may be another user's run.
    search = nullcontext() if module_name.startswith("retrain.") else _search(search_paths)
    with search, _importing(module_name, search_paths):
        module = importlib.import_module(module_name)
        found = hasattr(module, attribute)
    if not found:
        public = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        fix = did_you_mean(attribute, public, f"known: {', '.join(public) or 'none'}")
        raise ComponentError(f"{module_name} has no {attribute!r}", fix)
    return getattr(module, attribute)


def _from_target(kind: str, name: str, target: Any, source: str) -> Component:
    mark = getattr(target, MARK, None)
    if isinstance(mark, Component):
        if mark.kind != kind:
            raise ComponentError(f'"{name}" is a {mark.kind}, not a {kind}', f"use it as the {mark.kind}")
        return Component(kind, name, target, mark.table, mark.contract, mark.stated, source)
    if not callable(target):
        raise ComponentError(f'"{name}" is a {type(target).__name__}, not a function', "point to a function")
    check_signature(target, KINDS[kind].is_generator, KINDS[kind].is_async)
    contract: Contract = "columns" if inspect.isclass(target) else KINDS[kind].plain
    if contract != "columns":
        _check_plain(name, contract, target)
    return Component(kind, name, target, name, contract, source=source)


def _check_plain(name: str, contract: Contract, target: Callable[..., Any]) -> None:
    parameters = inspect.signature(target).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    most, form = (2, "(rewards) or (rewards, params)") if contract == "lists" else (1, "(ctx)")
    if not positional or len(required) > most:
        takes = ", ".join(p.name for p in parameters)
        raise ComponentError(
            f'"{name}" takes ({takes}); a plain function here is called as {form}',
            "change its parameters, or decorate it to read columns by name",
        )


@contextmanager
def _importing(name: str, search_paths: Sequence[str | Path] = ()) -> Generator[None]:
    """Convert any exception from importing the user's module, except Ctrl-C, to ComponentError.

    This includes `sys.exit`. Nothing can catch `os._exit`, which ends the process.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            looked, file = ", ".join(map(str, _places(search_paths))), name.split(".")[0]
            fix = f"is {file}.py (or {file}/) in the directory you started from, plugins/, or [plugins] search_paths?"
            raise ComponentError(f"no module named {error.name!r} (looked in {looked})", fix) from None
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        problem = f"importing {name} raised {described(error)}{place}"
        raise ComponentError(problem, "fix that file", own_frames(error)) from error


@contextmanager
def _search(search_paths: Sequence[str | Path]) -> Generator[None]:
    """Search the current directory, its `plugins/` and `search_paths` first inside this block.

    Afterwards they stay at the end of `sys.path`, for imports that the user's code makes later.
    """
    places = [str(place) for place in _places(search_paths)]
    before = list(sys.path)
    sys.path[:0] = places
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before + [place for place in places if place not in before]


def _places(search_paths: Sequence[str | Path]) -> list[Path]:
    own = Path.cwd() / "plugins"
    return [
        Path.cwd(),
        *([own] if own.is_dir() else ()),
        *(Path(place).expanduser().resolve() for place in search_paths),
    ]
