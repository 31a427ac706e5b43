"""Merge the keys of a preset, or of an evaluation set, into a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from os.path import isfile
from pathlib import Path as FilePath
from typing import Any

from retrain import registry
from retrain.algorithms.transforms.token_stages import transform_chain
from retrain.config.document import Document, flat, fork, merge, read, show
from retrain.config.positions import Path
from retrain.config.presets import FOLDER, Preset, leaves, preset_names, put, set_already
from retrain.config.sections.heldout import EvalSet
from retrain.errors import ConfigProblem
from retrain.registry.built_in import BUILT_IN
from retrain.system.files import expanded

_MODE: Path = ("algorithm", "algorithm_mode")


def apply_preset(document: Document) -> Preset | None:
    """Add the keys of the preset that `document` names and does not set itself; return None without a preset.

    Tables are merged key by key. A list, such as `[[loss]]`, is taken as a whole from the document, else from the
    preset. A preset file of the user is expanded, so that the document no longer refers to it.
    """
    algorithm = document.data.get("algorithm")
    name = algorithm.get("algorithm_mode") if isinstance(algorithm, dict) else None
    own = isinstance(name, str) and name.endswith(".toml")
    if not own and name not in preset_names():
        return None
    file = _own_file(document, str(name)) if own else FOLDER / f"{name}.toml"
    if own:
        del document.data["algorithm"]["algorithm_mode"]
    if file is None:
        return None
    source = read(file)
    document.problems += source.problems
    preset = _fill_in(document, source, str(name))
    if own:
        document.text = flat(document.file, document.data)
    return preset


def _fill_in(document: Document, source: Document, name: str) -> Preset:
    """Add the keys of a preset that the document does not set."""
    keys: dict[str, Any] = {}
    overridden: dict[str, str] = {}
    replaced: list[ConfigProblem] = []
    for path, value in _each_entry(leaves(source.data), document.data):
        if path == _MODE:
            document.problems.append(source.at(path, "a preset must not name a preset", "use extends in this file"))
            continue
        keys[show(path)] = value
        if around := set_already(document.data, path):
            place = document.at(around, *_replaces(name, path, value))
            overridden[show(path)] = f"{place.file}:{place.line}" if place.line else place.file
            own: Any = document.data
            for part in path if around == path else ():
                own = own[part]
            if place.line and (around != path or (own != value and _targets(path, own) != _targets(path, value))):
                replaced.append(place)
        else:
            put(document.data, path, value)
            below = {at: one for at, one in source.places.items() if at[: len(path)] == path or at == path[: len(at)]}
            if (named := document.places.get(_MODE)) is not None and name in preset_names():
                below = {at: replace(named, typed=one.typed, preset=name) for at, one in below.items()}
            document.places = below | document.places
    return Preset(name, source.file, keys, overridden, tuple(replaced))


def _targets(path: Path, value: Any) -> list[Any]:
    """Return the value of a key as a list; two names of the same built-in component, as "token-mean", become equal."""
    kind = next((one.name for one in registry.KINDS.values() if one.key == path), None)
    if kind is None:
        return [value]
    given: list[Any] = [*value] if isinstance(value, list) else [value]
    if kind == "transform" and isinstance(value, str):
        given = [*transform_chain(value)]
    return [BUILT_IN.get(kind, {}).get(one, one) if isinstance(one, str) else one for one in given]


def _each_entry(found: Iterator[tuple[Path, Any]], data: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield the keys of a preset. A key of a table that `data` lists several times is yielded for every entry.

    An example is `[expert] ratio` of a preset in a configuration with several `[[expert]]`.
    """
    for path, value in found:
        table, *rest = path
        several = data.get(str(table)) if rest else None
        if isinstance(several, list) and all(isinstance(entry, dict) for entry in several):
            yield from (((table, index, *rest), value) for index in range(len(several)))
        else:
            yield path, value


def _own_file(document: Document, name: str) -> FilePath | None:
    """Return the path of the user's preset, relative to the file that names it; None after recording an error."""
    place = document.places.get(_MODE)
    file = (FilePath(place.file).parent if place and place.line else FilePath()) / expanded(name)
    if isfile(file):
        return file
    document.refuse(_MODE, f'there is no file "{file}"', "give the path of a TOML file, relative to this one")
    return None


def _replaces(preset: str, path: Path, value: Any) -> tuple[str, str]:
    """Return problem and fix for a key that overrides the preset."""
    entries = value if isinstance(value, list) else []
    names = [str(entry["name"]) for entry in entries if isinstance(entry, dict) and "name" in entry]
    if names:
        return f'replaces {", ".join(names)} of preset "{preset}"', "list these as well, or remove your own"
    return f'replaces {json.dumps(value, default=str)} of preset "{preset}"', "remove it to have the preset's"


_PATHS: dict[str, Path] = {"task": ("task", "name"), "task_params": ("task", "params"), "rewards": ("rewards",)}
"""Key of an evaluation set -> its path in the configuration of a run; any other key belongs to [eval]."""

_ALL_HELD_OUT = {"heldout_fraction": 1.0, "heldout_path": None, "heldout_split": None}
"""Parameters of a registered task that hold out every row of its data set."""


def of_eval_set(document: Document, index: int, entry: EvalSet) -> Document:
    """Return the run's configuration with the changes of entry `index` of `[[eval.sets]]`."""
    found, at = fork(document), ("eval", "sets", index)
    del found.data["eval"]["sets"]
    for table, key in (("checkpoint", "best"), ("training", "stop_when")):  # their metric may be one of another set
        found.data.get(table, {}).pop(key, None)
    if entry.task is not None:
        found.data.pop("tasks", None)
        found.data["task"] = {}
        if registry.is_registered("task", entry.task):  # every row of an evaluation file is held out
            found.data["task"]["params"] = registry.find("task", entry.task).takes(_ALL_HELD_OUT)
    changes = entry.model_dump(mode="json", exclude_defaults=True) | {"problems": entry.problems}
    for key in [key for key in changes if key != "name"]:
        merge(found, _PATHS.get(key, ("eval", key)), changes[key], document, (*at, key))
    return found
