"""Merge the keys of a preset, or of an evaluation set, into a configuration."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from os.path import isfile
from pathlib import Path
from typing import Any

from retrain import registry
from retrain.algorithms.transforms.token_stages import transform_chain
from retrain.config.document import PRESET_KEY, Document, Place, flat, fork, merge, overlap, read, set_already, show
from retrain.config.positions import KeyPath, leaves
from retrain.config.presets import FOLDER, Preset, preset_names
from retrain.config.sections.heldout import EvalSet
from retrain.registry.built_in import BUILT_IN
from retrain.system.files import expanded


def _named(document: Document) -> Any:
    """Return the value of the key that may name a preset."""
    algorithm = document.data.get("algorithm")
    return algorithm.get("algorithm_mode") if isinstance(algorithm, dict) else None


def names_file(document: Document) -> bool:
    """Return True if the document names a preset of the user, which is a file."""
    name = _named(document)
    return isinstance(name, str) and name.endswith(".toml")


def apply_preset(document: Document) -> Preset | None:
    """Expand the preset that `document` names, between the layers below the one that names it and that one.

    Tables are merged key by key. A list, such as `[[loss]]`, is taken as a whole from one of the two. A preset file of
    the user is expanded, so that the document no longer refers to it. Returns None without a preset.
    """
    name = _named(document)
    is_users = names_file(document)
    if not is_users and name not in preset_names():
        return None
    file = _users_file(document, str(name)) if is_users else FOLDER / f"{name}.toml"
    # Only this machine has the file, and a stored run must open elsewhere.
    if is_users:
        del document.data["algorithm"]["algorithm_mode"]
    if file is None:
        return None
    source = read(file)
    document.problems += source.problems
    # `_expand` empties `lower`.
    layered = bool(document.lower)
    preset = _expand(document, source, str(name))
    if is_users or layered:  # one file without layers, in which the preset replaces nothing
        document.text = flat(document.file, document.data)
    return preset


def _expand(document: Document, source: Document, name: str) -> Preset:
    """Set the keys of a preset that the layer that names it, and those above, do not set."""
    preset = Preset(name, source.file)
    lower = document.lower
    for path, value in _each_entry(leaves(source.data), document.data):
        if path == PRESET_KEY:
            document.problems.append(source.at(path, "a preset must not name a preset", "use extends in this file"))
            continue
        preset.keys[show(path)] = value
        set_at = set_already(document.data, path)
        # The layer that names the preset is above the layers that set this key.
        if set_at == path and any(overlap(path, key_path) for key_path in lower):
            preset.outranked[path] = document.at(path, *_replaces(name, path, value))
            document.forget(path)
            set_at = ()
        if set_at:
            _keep(document, preset, path, set_at)
        else:
            document.set(path, value, _places(document, source, name, path))
    # The keys of the preset are set now; what comes later is above all of them.
    document.lower = set()
    return preset


def _keep(document: Document, preset: Preset, path: KeyPath, set_at: KeyPath) -> None:
    """Note that the document sets a key of the preset; warn if a line of a file sets it to another value."""
    value = preset.keys[show(path)]
    replacement = document.at(set_at, *_replaces(preset.name, path, value))
    preset.overridden[show(path)] = f"{replacement.file}:{replacement.line}" if replacement.line else replacement.file
    written: Any = document.data
    for part in path if set_at == path else ():
        written = written[part]
    changed = set_at != path or (written != value and _targets(path, written) != _targets(path, value))
    if replacement.line and changed:
        preset.replaced.append(replacement)


def _places(document: Document, source: Document, name: str, path: KeyPath) -> dict[KeyPath, Place]:
    """Return the places of a key of the preset; the place of a built-in one is the key that names it."""
    places = {key_path: key_place for key_path, key_place in source.places.items() if overlap(key_path, path)}
    naming = document.places.get(PRESET_KEY)
    if naming is not None and name in preset_names():
        places = {at: replace(naming, typed=key_place.typed, preset=name) for at, key_place in places.items()}
    return places


def _targets(path: KeyPath, value: Any) -> list[Any]:
    """Return the value of a key as a list; two names of the same built-in component, as "token-mean", become equal."""
    kind = next((kind.name for kind in registry.KINDS.values() if kind.key == path), None)
    if kind is None:
        return [value]
    names: list[Any] = [*value] if isinstance(value, list) else [value]
    if kind == "transform" and isinstance(value, str):
        names = [*transform_chain(value)]
    return [BUILT_IN.get(kind, {}).get(name, name) if isinstance(name, str) else name for name in names]


def _each_entry(preset_keys: Iterator[tuple[KeyPath, Any]], data: Mapping[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the keys of a preset. A key of a table that `data` lists several times is yielded for every entry.

    An example is `[expert] ratio` of a preset in a configuration with several `[[expert]]`.
    """
    for path, value in preset_keys:
        table, *rest = path
        several = data.get(str(table)) if rest else None
        if isinstance(several, list) and all(isinstance(entry, dict) for entry in several):
            yield from (((table, index, *rest), value) for index in range(len(several)))
        else:
            yield path, value


def _users_file(document: Document, name: str) -> Path | None:
    """Return the path of the user's preset, relative to the file that names it; None after recording an error."""
    naming = document.places.get(PRESET_KEY)
    file = (Path(naming.file).parent if naming and naming.line else Path()) / expanded(name)
    if isfile(file):
        return file
    document.refuse(PRESET_KEY, f'there is no file "{file}"', "give the path of a TOML file, relative to this one")
    return None


def _replaces(preset: str, path: KeyPath, value: Any) -> tuple[str, str]:
    """Return problem and fix for a key that overrides the preset."""
    entries = value if isinstance(value, list) else []
    names = [str(entry["name"]) for entry in entries if isinstance(entry, dict) and "name" in entry]
    if names:
        return f'replaces {", ".join(names)} of preset "{preset}"', "list these as well, or remove your own"
    return f'replaces {json.dumps(value, default=str)} of preset "{preset}"', "remove it to have the preset's"


_PATHS: dict[str, KeyPath] = {"task": ("task", "name"), "task_params": ("task", "params"), "rewards": ("rewards",)}
"""Key of an evaluation set -> its path in the configuration of a run; any other key belongs to [eval]."""

_ALL_HELD_OUT = {"heldout_fraction": 1.0, "heldout_path": None, "heldout_split": None}
"""Parameters of a registered task that hold out every row of its data set."""


def of_eval_set(document: Document, index: int, entry: EvalSet) -> Document:
    """Return the run's configuration with the changes of entry `index` of `[[eval.sets]]`."""
    at = ("eval", "sets", index)
    evaluated = fork(document)
    del evaluated.data["eval"]["sets"]
    for table, key in (("checkpoint", "best"), ("training", "stop_when")):  # their metric may be one of another set
        evaluated.data.get(table, {}).pop(key, None)
    if entry.task is not None:
        evaluated.data.pop("tasks", None)
        evaluated.data["task"] = {}
        if registry.is_registered("task", entry.task):  # every row of an evaluation file is held out
            evaluated.data["task"]["params"] = registry.find("task", entry.task).takes(_ALL_HELD_OUT)
    changes = entry.model_dump(mode="json", exclude_defaults=True) | {"problems": entry.problems}
    for key in [key for key in changes if key != "name"]:
        merge(evaluated, _PATHS.get(key, ("eval", key)), changes[key], document, (*at, key))
    return evaluated
