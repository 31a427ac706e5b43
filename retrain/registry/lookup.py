"""Find components by registered name, entry point or dotted path."""

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

from retrain.errors import ComponentError, ForeignCodeError, did_you_mean
from retrain.registry.built_in import BUILT_IN, TABLES
from retrain.registry.call import described, own_frames
from retrain.registry.component import (
    KINDS,
    MARK,
    OPEN,
    REGISTERED,
    STRICT,
    Component,
    Contract,
    check_signature,
)
from retrain.registry.sources import is_installed, module_hashes
from retrain.system.files import expanded

_HARMLESS = ("retrain.environments.tools.python", "builtins.str")
"""Paths that a stored configuration may name, although they are neither components nor the user's own code."""


@cache
def _entry_points() -> dict[str, dict[str, EntryPoint]]:
    """Return the entry points of installed packages by kind and name."""
    points = entry_points()
    return {kind: {point.name: point for point in points.select(group=f"retrain.{kind}")} for kind in KINDS}


def entry_names(kind: str) -> list[str]:
    """Return the names of a kind's entry points in installed packages."""
    return sorted(_entry_points()[kind])


def names(kind: str) -> list[str]:
    """Return the names of all built-in and registered components and entry points of a kind."""
    return sorted({*BUILT_IN.get(kind, ()), *(name for of, name in REGISTERED if of == kind), *_entry_points()[kind]})


def is_registered(kind: str, name: str) -> bool:
    """Return whether a name is that of a built-in or registered component, or of an importable entry point."""
    is_listed = name in BUILT_IN.get(kind, ()) or (kind, name) in REGISTERED
    return is_listed or _importable_entry_point(kind, name) is not None


def components(kind: str | None = None, tables: Container[str] | None = None) -> list[Component]:
    """Return all built-in and registered components, and those of importable entry points.

    Args:
        kind: restrict the result to this kind.
        tables: restrict the result to components whose TOML table is one of these. Entry points are
            then imported only if their name is one of these.
    """
    for of, rows in BUILT_IN.items():
        for name in rows if kind in (None, of) else ():
            if tables is None or TABLES.get(of, {}).get(name, name) in tables:
                _import_built_in(of, name)
    imported = dict[tuple[str, str], Component]()
    for of, points in _entry_points().items():
        for name in points if kind in (None, of) else ():
            if (tables is None or name in tables) and (component := _importable_entry_point(of, name)):
                imported[of, name] = component
    # Sorted by module, with the user's components last, so that the order does not depend on that of imports.
    every = (imported | REGISTERED).values()
    in_order = sorted(
        every, key=lambda component: component.target.__module__ if component.source == "built-in" else "~"
    )
    return [
        component
        for component in in_order
        if kind in (None, component.kind) and (tables is None or component.table in tables)
    ]


def _import_built_in(kind: str, name: str) -> None:
    importlib.import_module(_built_in_module(kind, name))


def _built_in_module(kind: str, name: str) -> str:
    """Return the name of the module of a built-in component."""
    return BUILT_IN[kind][name].partition(":")[0]


def find(kind: str, name: str, search_paths: Sequence[str | Path] = ()) -> Component:
    """Return a component.

    Args:
        kind: one of KINDS.
        name: a registered name, the name of an entry point in group `retrain.<kind>`, or a dotted path
            `pkg.mod.fn` or `pkg.mod:fn`.
        search_paths: directories in which modules are searched, after the current directory and its `plugins/`.

    Raises:
        ComponentError: the component does not exist (the message suggests the nearest name), importing its module
            raised an exception (the error has the traceback), or its signature does not fit the kind.
    """
    # The import registers the component.
    if name in BUILT_IN.get(kind, ()):
        _import_built_in(kind, name)
    if (kind, name) in REGISTERED:
        return REGISTERED[kind, name]
    if name in _entry_points()[kind]:
        return _load_entry_point(kind, name)
    if is_dotted(name):
        components()  # register all names first, so that the user's code cannot take one of them
        return _from_target(kind, name, load_object(name, search_paths, kind), "dotted path")
    listed = f"known: {', '.join(names(kind)) or 'none'}, or a dotted path to your own"
    raise ComponentError(f'no {kind} named "{name}"', did_you_mean(name, names(kind), listed))


def _load_entry_point(kind: str, name: str) -> Component:
    """Import an entry point and return its component.

    Raises:
        ComponentError: the import fails, or its module registers the name of a built-in component.
    """
    point = _entry_points()[kind][name]
    with _importing(point.value):
        target = point.load()
    # A decorator in the module may have taken the name of a built-in component that is not imported yet.
    for (of, registered_name), component in REGISTERED.items():
        module = component.target.__module__
        if registered_name in BUILT_IN.get(of, ()) and module != _built_in_module(of, registered_name):
            other = _built_in_module(of, registered_name)
            problem = f"{of} {registered_name!r} is registered twice: by {module} and {other}"
            raise ComponentError(problem, "rename one of them")
    registered = REGISTERED.get((kind, name))
    # The entry points of `retrain/lab` are components of this package.
    if registered is not None and registered.source == "built-in" and registered.target is target:
        return registered
    return _from_target(kind, name, target, "entry point")


def _importable_entry_point(kind: str, name: str) -> Component | None:
    """Return the component of an entry point; None if there is no such entry point or its import fails."""
    if name not in _entry_points()[kind]:
        return None
    try:
        return _load_entry_point(kind, name)
    # A broken plug-in matters only to a file that names it, and then `find` reports the error.
    except ComponentError:
        return None


def is_dotted(name: str) -> bool:
    """Return whether a name is a dotted path to the user's code."""
    return "." in name or ":" in name


def bind(
    kind: str, name: str, params: Mapping[str, Any] | None = None, search_paths: Sequence[str | Path] = ()
) -> Component:
    """Find a component and bind its parameters.

    Args:
        kind: see `find`.
        name: see `find`.
        params: the parameters.
        search_paths: see `find`.
    Raises:
        ComponentError: see `find`; or a run cannot build the component.
        MissingExtraError: a library that the component needs is not installed.
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
    """Return the schema of a table that several components share, with the parameters of all of them.

    A plain function takes any key. A required parameter that not all of them have is optional in this schema; `bind`
    reports it if it is missing.

    Args:
        readers: the components that read the table.
    """
    fields: dict[str, Any] = {}
    for reader in readers:
        for key, info in reader.schema.model_fields.items():
            if info.is_required() and not all(key in other.schema.model_fields for other in readers):
                # The original belongs to the schema of the component.
                info = copy.copy(info)
                info.default = None
            fields[key] = (info.annotation, info)
    config = STRICT if all(reader.contract == "columns" for reader in readers) else OPEN
    return create_model(readers[0].table, __config__=config, **fields)


def load_object(path: str, search_paths: Sequence[str | Path] = (), kind: str = "") -> Any:
    """Import an object by its dotted path, which runs the user's code.

    Args:
        path: `pkg.mod.attr` or `pkg.mod:attr`.
        search_paths: see `find`.
        kind: kind of component that the object may be, also one of a package when a stored run is opened.
    Raises:
        ComponentError: the path is malformed, its module cannot be imported, or the module has no such attribute.
    """
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if not module_name or not all(part.isidentifier() for part in f"{module_name}.{attribute}".split(".")):
        raise ComponentError(f'"{path}" is not a dotted path', "write it as package.module.function")
    # Modules of this package or Python must not be found in the current directory, which may be a run of another user.
    search = nullcontext() if path in _HARMLESS or module_name.startswith("retrain.") else _search(search_paths)
    with search, _importing(module_name, search_paths):
        if path not in _HARMLESS:
            from retrain.registry.foreign_code import check_may_import

            check_may_import(path, _directories(search_paths))
        module = importlib.import_module(module_name)
        target = getattr(module, attribute, None)
    # Records the hash of the file that was imported, so that a later change is noticed.
    if not is_installed(module.__spec__):
        module_hashes([module_name])
    if target is None:
        public = sorted(name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
        fix = did_you_mean(attribute, public, f"known: {', '.join(public) or 'none'}")
        raise ComponentError(f"{module_name} has no {attribute!r}", fix)
    mark = getattr(target, MARK, None)
    if path not in _HARMLESS and not (isinstance(mark, Component) and mark.kind == kind):
        from retrain.registry.foreign_code import check_is_own

        check_is_own(path, module, target, _directories(search_paths))
    return target


def _from_target(kind: str, name: str, target: Any, source: str) -> Component:
    """Return the component of an imported object; raise ComponentError if the object is not one of this kind."""
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
    """Raise ComponentError if an undecorated function cannot be called by the contract."""
    parameters = inspect.signature(target).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    most, form = (2, "(rewards) or (rewards, params)") if contract == "lists" else (1, "(ctx)")
    # The second parameter gets a dict, which in place of a default such as True would be another truth value.
    misused = [p for p in positional[1:most] if p.name != "params" and p.default not in (p.empty, None)]
    if not positional or len(required) > most or misused:
        takes = ", ".join(p.name for p in parameters)
        raise ComponentError(
            f'"{name}" takes ({takes}); a plain function here is called as {form}',
            "put parameters of its own after a *, or decorate it to read columns by name",
        )


@contextmanager
def _importing(name: str, search_paths: Sequence[str | Path] = ()) -> Generator[None]:
    """Convert any exception from importing the user's module, except Ctrl-C, to ComponentError.

    This includes `sys.exit`, but not `os._exit`, which ends the process.

    Args:
        name: dotted name of the module.
        search_paths: see `find`.
    """
    try:
        yield
    except (KeyboardInterrupt, ForeignCodeError):
        raise
    except BaseException as error:
        # The module or its package is missing. If a module that it imports is missing, the file exists and is at fault.
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            searched, file = ", ".join(map(str, _directories(search_paths))), name.split(".")[0]
            fix = f"put {file}.py (or {file}/) into the working directory, plugins/, or one of [plugins] search_paths"
            raise ComponentError(f"no module named {error.name!r} (searched in {searched})", fix) from None
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        location = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        problem = f"importing {name} raised {described(error)}{location}"
        raise ComponentError(problem, "fix the file", own_frames(error)) from error


@contextmanager
def _search(search_paths: Sequence[str | Path]) -> Generator[None]:
    """Put the current directory, its `plugins/` and `search_paths` at the start of `sys.path` inside the block.

    Afterwards they are at the end of `sys.path`, for later imports by the user's code.
    """
    directories = [str(directory) for directory in _directories(search_paths)]
    # The user's folders come first, so that their file wins over an installed module of its name.
    before = list(sys.path)
    sys.path[:0] = directories
    # The file may have been written since Python listed its folder.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before + [directory for directory in directories if directory not in before]


def _directories(search_paths: Sequence[str | Path]) -> list[Path]:
    plugins = Path.cwd() / "plugins"
    return [
        Path.cwd(),
        *([plugins] if plugins.is_dir() else ()),
        *(expanded(directory).resolve() for directory in search_paths),
    ]
