"""Find the values of an untrusted configuration that run code or access anything outside the run."""

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
from retrain.system.files import expanded

_PRIVILEGED_VALUES: dict[Path, tuple[Callable[[Any], bool], str]] = {
    ("model", "trust_remote_code"): (bool, "runs Python files that come with the model"),
    ("environment", "python"): (bool, "starts this program"),
    ("environment", "workers"): (lambda value: value == 0, "runs the environment without a sandbox"),
    ("rewards", "network"): (bool, "runs the reward without a sandbox"),
    ("reward_pool", "workers"): (lambda value: value == 0, "runs rewards without a sandbox"),
    ("reward_pool", "sandbox"): (lambda value: value == "off", "runs rewards without a sandbox"),
    ("reward_pool", "env"): (bool, "shows these environment variables to rewards"),
    ("reward_pool", "readable"): (bool, "lets rewards read these files"),
}
"""Keys of sections whose values can need trust: a test of the value, and its effect.

`[plugins] search_paths` is not listed, because it has an effect only if a dotted path needs trust as well."""
_HARMLESS_FUNCTIONS = ("retrain.environments.tools.python",)
"""Functions of this package whose dotted path in a parameter needs no trust."""


class Privilege(NamedTuple):
    """A value of a configuration that runs code or accesses anything outside the run.

    Attributes:
        path: the key.
        value: the value as text.
        does: the effect of the value, for errors.
    """

    path: Path
    value: str
    does: str


def privileges(document: Document, search_paths: Sequence[str] = ()) -> list[Privilege]:
    """Return every value of a document that needs trust, without importing anything the document names.

    The list is empty if a section is invalid. Validation rejects such a document before it imports anything.

    Args:
        document: the configuration.
        search_paths: `[plugins] search_paths`, to find the file of a module for the error.
    """
    try:
        config = Config.model_validate({key: document.data[key] for key in document.data if key in Config.model_fields})
    except ValidationError:
        return []
    found = [*_section_privileges(config), *_component_privileges(config, document.data, search_paths)]
    for index, entry in enumerate(config.eval.sets):
        at = ("eval", "sets", index)
        inner = privileges(of_eval_set(document, index, entry), search_paths)
        found += [one._replace(path=(*at, *one.path)) for one in inner if one not in found]
    return found


def refuse_foreign(document: Document, chosen: Collection[Path], search_paths: Sequence[str]) -> None:
    """Raise ConfigError if the configuration of an untrusted run has values that need trust.

    Args:
        document: the configuration.
        chosen: keys that the user has set on the command line; their values are trusted.
        search_paths: see `privileges`.
    """
    own = [path for path in chosen if path]
    found = [
        one for one in privileges(document, search_paths) if not any(one.path[: len(path)] == path for path in own)
    ]
    if found:
        fix = "check the value, then add --trust, or override the key with --set"
        error = ConfigError(
            [ConfigProblem(document.file, 0, 0, show(one.path), f"{one.value} {one.does}", fix) for one in found]
        )
        error.add_note(
            "The configuration is part of the run directory, and you did not train this run here. Your own runs are "
            "trusted in the working directory in which you trained them, as long as they are not moved."
        )
        raise error


def _section_privileges(config: Config) -> Iterator[Privilege]:
    for (section, key), (needs_trust, does) in _PRIVILEGED_VALUES.items():
        part = getattr(config, str(section))
        for index, entry in enumerate(part) if isinstance(part, tuple) else [(None, part)]:
            value = getattr(entry, str(key))
            if needs_trust(value):
                yield Privilege((section, key) if index is None else (section, index, key), repr(value), does)


def _component_privileges(
    config: Config, tables: Mapping[str, Any], search_paths: Sequence[str]
) -> Iterator[Privilege]:
    """Yield dotted paths of components, and parameters of components that name code or access a server.

    This includes the tables of unused components, because validation checks every table and may import what it names.
    """
    named = list(slots(config, tables))
    for slot in named:
        if slot.name in registry.names(slot.kind):
            yield from _parameter_privileges(
                registry.find(slot.kind, slot.name), slot.params, slot.params_path, search_paths
            )
        elif is_dotted(slot.name):
            yield _import_of(slot.path, slot.name, search_paths)
    for component in registry.components(tables=tables):
        table = tables.get(component.table)
        if isinstance(table, dict):
            used = not registry.KINDS[component.kind].key or _is_named(component, named)
            yield from _parameter_privileges(component, table, (component.table,), search_paths, used=used)


def _is_named(component: Component, named: Sequence[Slot]) -> bool:
    return any((slot.kind, slot.name) == (component.kind, component.name) for slot in named)


def _parameter_privileges(
    component: Component, params: Mapping[str, Any], at: Path, search_paths: Sequence[str], *, used: bool = True
) -> Iterator[Privilege]:
    defaults = component.schema.model_fields
    for key in component.traits.imports:
        value = params.get(key)
        if key in defaults and value != defaults[key].default:
            paths = [value] if isinstance(value, str) else value if isinstance(value, list | tuple) else ()
            for path in paths:
                if isinstance(path, str) and is_dotted(path) and path not in _HARMLESS_FUNCTIONS:
                    yield _import_of((*at, key), path, search_paths)
    for key, does in component.traits.reaches.items() if used else ():
        if params.get(key) is not None:
            yield Privilege((*at, key), repr(params[key]), does)


def _import_of(path: Path, name: str, search_paths: Sequence[str]) -> Privilege:
    module = name.replace(":", ".").rpartition(".")[0]
    spec = _find_spec(module, [str(FilePath.cwd()), *(str(expanded(one)) for one in search_paths)])
    where = f"from {spec.origin}" if spec is not None and spec.origin else "which is not found here"
    return Privilege(path, f'"{name}"', f"imports the module {module or name}, {where}")


def _find_spec(module: str, places: Sequence[str]) -> ModuleSpec | None:
    """Find the file of a module without importing its parent packages."""
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
