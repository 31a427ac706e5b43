"""Find the values of an untrusted configuration that run code or reach beyond the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from pydantic import ValidationError

from retrain import registry
from retrain.config.document import Document, show
from retrain.config.positions import Path
from retrain.config.presets import of_eval_set
from retrain.config.resolve import Slot, slots
from retrain.config.schema import Config
from retrain.errors import ConfigError, ConfigProblem
from retrain.registry import Component, is_dotted

_KEYS: dict[Path, tuple[Callable[[Any], bool], str]] = {
    ("model", "trust_remote_code"): (bool, "runs Python files that come with the model"),
    ("environment", "python"): (bool, "starts this program"),
    ("environment", "workers"): (lambda value: value == 0, "runs the environment without a sandbox"),
    ("rewards", "network"): (bool, "runs the reward without a sandbox"),
    ("reward_pool", "workers"): (lambda value: value == 0, "runs rewards without a sandbox"),
    ("reward_pool", "sandbox"): (lambda value: value == "off", "runs rewards without a sandbox"),
    ("reward_pool", "env"): (bool, "shows these environment variables to rewards"),
    ("reward_pool", "readable"): (bool, "lets rewards read these files"),
}
"""Section keys with the values that need trust, and the effect of these values.

`[plugins] search_paths` is ignored instead: only a dotted path makes use of it."""
_PACKAGED = ("retrain.environments.tools.python",)
"""Functions of this package that a parameter may name by their dotted path."""


class Power(NamedTuple):
    """One value that runs code or reaches beyond the run.

    Attributes:
        path: the key.
        value: its value.
        does: its effect, in words.
    """

    path: Path
    value: str
    does: str


def powers(document: Document, search_paths: Sequence[str] = ()) -> list[Power]:
    """Return every value of a document that needs trust; nothing is imported.

    Empty for a document with mistakes in its sections, which `validate` refuses before it imports anything.

    Args:
        search_paths: `[plugins] search_paths`, to name the file of a module.
    """
    try:
        config = Config.model_validate({key: document.data[key] for key in document.data if key in Config.model_fields})
    except ValidationError:
        return []
    found = [*_of_sections(config), *_of_components(config, document.data, search_paths)]
    for index, entry in enumerate(config.eval.sets):
        at = ("eval", "sets", index)
        inner = powers(of_eval_set(document, index, entry), search_paths)
        found += [one._replace(path=(*at, *one.path)) for one in inner if one not in found]
    return found


def refuse_foreign(document: Document, chosen: Collection[Path], search_paths: Sequence[str]) -> None:
    """Raise ConfigError if the configuration of an untrusted run runs code or reaches beyond the run.

    Args:
        chosen: keys that the user has overridden on the command line.
        search_paths: see `powers`.
    """
    own = [path for path in chosen if path]
    found = [one for one in powers(document, search_paths) if not any(one.path[: len(path)] == path for path in own)]
    if found:
        fix = "read it, then add --trust, or override the key with --set"
        error = ConfigError(
            [ConfigProblem(document.file, 0, 0, show(one.path), f"{one.value} {one.does}", fix) for one in found]
        )
        error.add_note(
            "A run brings its configuration with it, and this one was not trained here by you. Your own runs are "
            "trusted where you trained them: in the same working directory, and not moved since."
        )
        raise error


def _of_sections(config: Config) -> Iterator[Power]:
    for (section, key), (is_power, does) in _KEYS.items():
        part = getattr(config, str(section))
        for index, entry in enumerate(part) if isinstance(part, tuple) else [(None, part)]:
            value = getattr(entry, str(key))
            if is_power(value):
                yield Power((section, key) if index is None else (section, index, key), repr(value), does)


def _of_components(config: Config, tables: Mapping[str, Any], search_paths: Sequence[str]) -> Iterator[Power]:
    """Names of code, and parameters of components that name code or a server.

    A table can name code even if nothing in use reads it, because every table is checked.
    """
    named = list(slots(config, tables))
    for slot in named:
        if slot.name in registry.names(slot.kind):
            yield from _of_parameters(registry.find(slot.kind, slot.name), slot.params, slot.params_path, search_paths)
        elif is_dotted(slot.name):
            yield _code(slot.path, slot.name, search_paths)
    for component in registry.components(tables=tables):
        table = tables.get(component.table)
        if isinstance(table, dict):
            used = not registry.KINDS[component.kind].key or _is_named(component, named)
            yield from _of_parameters(component, table, (component.table,), search_paths, used=used)


def _is_named(component: Component, named: Sequence[Slot]) -> bool:
    return any((slot.kind, slot.name) == (component.kind, component.name) for slot in named)


def _of_parameters(
    component: Component, params: Mapping[str, Any], at: Path, search_paths: Sequence[str], *, used: bool = True
) -> Iterator[Power]:
    defaults = component.schema.model_fields
    for key in component.traits.imports:
        value = params.get(key)
        if key in defaults and value != defaults[key].default:
            paths = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
            for path in paths:
                if isinstance(path, str) and is_dotted(path) and path not in _PACKAGED:
                    yield _code((*at, key), path, search_paths)
    for key, does in component.traits.reaches.items() if used else ():
        if params.get(key) is not None:
            yield Power((*at, key), repr(params[key]), does)


def _code(path: Path, name: str, search_paths: Sequence[str]) -> Power:
    module = name.replace(":", ".").rpartition(".")[0]
    spec = _spec(module, [str(FilePath.cwd()), *(str(FilePath(one).expanduser()) for one in search_paths)])
    where = f"from {spec.origin}" if spec is not None and spec.origin else "which is not found here"
    return Power(path, f'"{name}"', f"imports the module {module or name}, {where}")


def _spec(module: str, places: Sequence[str]) -> ModuleSpec | None:
    """Find the file of a module without importing its packages."""
    spec: ModuleSpec | None = None
    for depth, part in enumerate(parts := module.split("."), 1):
        folders = None if spec is None else spec.submodule_search_locations
        if depth == 1:
            spec = PathFinder.find_spec(part, places) or PathFinder.find_spec(part)
        else:
            spec = PathFinder.find_spec(".".join(parts[:depth]), folders) if folders else None
        if spec is None:
            return None
    return spec
