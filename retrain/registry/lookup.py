"""Find a component by registered name, entry point or dotted path."""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pydantic import BaseModel, create_model

from retrain.errors import ComponentError, did_you_mean
from retrain.registry.call import described, own_frames
from retrain.registry.component import KINDS, MARK, REGISTERED, STRICT, Bound, Component, Contract, check_signature

_PACKAGE = Path(__file__).parents[1]


class Declared(NamedTuple):
    """Where a component of the package is declared, and the names of the decorator's arguments: its traits."""

    table: str
    module: str
    traits: frozenset[str]


@cache
def declared() -> Mapping[tuple[str, str], Declared]:
    """Every component of the package by (kind, name), read from its source.

    A run imports the modules of the components that it names, not those of all engines and executors.
    """
    found, first = dict[tuple[str, str], Declared](), r'\(\s*"([^"]+)"(?:,\s*table="([^"]+)")?'
    pattern = rf"^@({'|'.join(KINDS)}){first}(.*?)(?=^(?:@|class |def |async ))"
    declares = re.compile(pattern, re.MULTILINE | re.DOTALL)
    for file in sorted(_PACKAGE.rglob("*.py")):
        module = ".".join(file.relative_to(_PACKAGE.parent).with_suffix("").parts)
        for kind, name, table, more in declares.findall(file.read_text(encoding="utf-8")):
            found[kind, name] = Declared(table or name, module, frozenset(re.findall(r"(\w+)=", more)))
    return found


@cache
def _entry_points(kind: str) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"retrain.{kind}")}


def entry_names(kind: str) -> list[str]:
    """Names that other packages' entry points bring."""
    return sorted(_entry_points(kind))


def names(kind: str) -> list[str]:
    """Every name that `kind` can be called by, dotted paths aside."""
    return sorted({name for k, name in (*declared(), *REGISTERED) if k == kind} | set(_entry_points(kind)))


def is_registered(kind: str, name: str) -> bool:
    """Whether there is a component of this name, those aside that entry points and dotted paths bring."""
    return (kind, name) in declared() or (kind, name) in REGISTERED


def components(
    kind: str | None = None, tables: Container[str] | None = None, trait: str | None = None
) -> list[Component]:
    """Every registered component; entry points are not imported.

    Args:
        kind: only those of this kind.
        tables: only those that read any of these.
        trait: only those that have it.
    """

    def wanted(of: str, one: Declared | Component) -> bool:
        return kind in (None, of) and (tables is None or one.table in tables) and (trait is None or trait in one.traits)

    for (of, _), one in declared().items():
        if wanted(of, one):
            importlib.import_module(one.module)
    # By module, the user's last: the order must not depend on what was imported first.
    in_order = sorted(REGISTERED.values(), key=lambda one: one.target.__module__ if one.source == "built-in" else "~")
    return [one for one in in_order if wanted(one.kind, one)]


def find(kind: str, name: str, search_paths: Sequence[str | Path] = ()) -> Component:
    """The `kind` called `name`.

    Args:
        kind: one of KINDS.
        name: a registered name, an entry point's name in group `retrain.<kind>`, or a dotted path
            `pkg.mod.fn` or `pkg.mod:fn`, resolved against the current directory, then `search_paths`.

    Raises:
        ComponentError: there is none (with the nearest name), its module raised (with the traceback), or
            its signature is not what the slot calls.
    """
    if (kind, name) in declared():
        importlib.import_module(declared()[kind, name].module)
    if (kind, name) in REGISTERED:
        return REGISTERED[kind, name]
    components()  # code of the user's may register a name, which must not be that of any
    if name in _entry_points(kind):
        point = _entry_points(kind)[name]
        with _importing(point.value):
            target = point.load()
        return _from_target(kind, name, target, "entry point")
    if is_dotted(name):
        return _from_target(kind, name, load_object(name, search_paths), "dotted path")
    listed = f"known: {', '.join(names(kind)) or 'none'}, or a dotted path to your own"
    raise ComponentError(f'no {kind} named "{name}"', did_you_mean(name, names(kind), listed))


def is_dotted(name: str) -> bool:
    """Whether a name is a path to code of the user's."""
    return "." in name or ":" in name


def bind(
    kind: str, name: str, params: Mapping[str, Any] | None = None, search_paths: Sequence[str | Path] = ()
) -> Bound:
    """The `kind` called `name` with its parameters, ready to be used.

    Raises:
        ComponentError: as `find`. MissingExtraError: its library is not installed.
        ParameterError: it does not take these parameters.
    """
    component = find(kind, name, search_paths)
    component.check()
    return component.bind(params)


def table_names() -> dict[str, list[Component]]:
    """TOML tables of all registered components, with the components that read them."""
    tables: dict[str, list[Component]] = {}
    for component in components():
        tables.setdefault(component.table, []).append(component)
    return tables


def table_schema(readers: Sequence[Component]) -> type[BaseModel]:
    """Schema of a table that several components share: the union of their parameters.

    What one of them demands may be missing while another is in use: binding the one says so.
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
    """The object at a dotted path `pkg.mod.attr` or `pkg.mod:attr`; importing runs the user's file."""
    module_name, _, attribute = path.replace(":", ".").rpartition(".")
    if not module_name or not all(part.isidentifier() for part in f"{module_name}.{attribute}".split(".")):
        raise ComponentError(f'"{path}" is not a dotted path', "write it as package.module.function")
    # Modules of the package do not look into the current directory: it may be a run of somebody else.
    search = nullcontext() if module_name.startswith(f"{_PACKAGE.name}.") else _search(search_paths)
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
        return Component(kind, name, target, mark.table, mark.contract, mark.traits, source)
    if not callable(target):
        raise ComponentError(f'"{name}" is a {type(target).__name__}, not a function', "point to a function")
    check_signature(target, KINDS[kind].talks, KINDS[kind].later)
    contract: Contract = "columns" if inspect.isclass(target) else KINDS[kind].plain
    if contract != "columns":
        _check_plain(name, contract, target)
    return Component(kind, name, target, name, contract, KINDS[kind].traits, source)


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
    """ComponentError for whatever importing the user's module `name` raises in this block, but for Ctrl-C.

    A module that leaves the process when it is imported must not take this one with it, least of all with code 0.
    """

    def leave(code: int) -> NoReturn:
        raise SystemExit(f"os._exit({code})")

    places: tuple[Any, ...] = (os, sys.modules[os.name])
    real = os._exit
    for module in places:
        module._exit = leave
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            looked, file = ", ".join(map(str, _places(search_paths))), name.split(".")[0]
            fix = f"is {file}.py (or {file}/) in the directory you started from, or in [plugins] search_paths?"
            raise ComponentError(f"no module named {error.name!r} (looked in {looked})", fix) from None
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
        place = f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        problem = f"importing {name} raised {described(error)}{place}"
        raise ComponentError(problem, "mend that file", own_frames(error)) from error
    finally:
        for module in places:
            module._exit = real


@contextmanager
def _search(search_paths: Sequence[str | Path]) -> Generator[None]:
    """Look in the current directory and `search_paths` first; keep them at the end for later imports."""
    places = [str(place) for place in _places(search_paths)]
    before = list(sys.path)
    sys.path[:0] = places
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before + [place for place in places if place not in before]


def _places(search_paths: Sequence[str | Path]) -> list[Path]:
    return [Path.cwd(), *(Path(place).expanduser().resolve() for place in search_paths)]
