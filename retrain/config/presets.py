"""`[algorithm] algorithm_mode = "dapo"`: a shipped TOML fragment laid under the keys of the configuration."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path as FilePath
from typing import Any

import tomli

from retrain import registry
from retrain.config.document import Document, Place, fork, lay, show
from retrain.config.positions import Path, positions
from retrain.config.sections.heldout import EvalSet

FOLDER = FilePath(__file__).parents[1] / "presets"


@dataclass(frozen=True)
class Preset:
    """What a preset set in one configuration.

    Attributes:
        name, file: of the preset.
        keys: every key of the preset -> its value there.
        overridden: the keys that the configuration sets itself -> where.
    """

    name: str
    file: str
    keys: Mapping[str, Any]
    overridden: Mapping[str, str]


@cache
def preset_names() -> tuple[str, ...]:
    """Every shipped preset."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.toml")))


def preset_summary(name: str) -> str:
    """What the first line of a preset's file says of it."""
    return (FOLDER / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def lay_under(document: Document) -> Preset | None:
    """Add what the preset that `document` names sets and the document does not; None if it names none.

    Tables are merged key by key; a list, such as `[[loss]]`, is the document's or the preset's as a whole.
    """
    algorithm = document.data.get("algorithm")
    name = algorithm.get("algorithm_mode") if isinstance(algorithm, dict) else None
    if name not in preset_names():
        return None
    file = FOLDER / f"{name}.toml"
    text = file.read_text(encoding="utf-8")
    written = {path: Place(str(file), *place, path) for path, place in positions(text).items()}
    keys: dict[str, Any] = {}
    overridden: dict[str, str] = {}
    for path, value in leaves(tomli.loads(text)):
        keys[show(path)] = value
        if around := _set_already(document.data, path):
            place = document.at(around, "", "")
            overridden[show(path)] = f"{place.file}:{place.line}" if place.line else place.file
        else:
            _put(document.data, path, value)
            below = {at: place for at, place in written.items() if at[: len(path)] == path or at == path[: len(at)]}
            document.places = below | document.places
    return Preset(str(name), str(file), keys, overridden)


def lay_task(document: Document) -> None:
    """Add what the task of this package that `document` names has in its trait `settings` and the document does not."""
    section = document.data.get("task")
    name = section.get("name") if isinstance(section, dict) else None
    if not isinstance(name, str) or not registry.is_registered("task", name):
        return
    for path, value in leaves(registry.find("task", name).traits.get("settings", {})):
        if not _set_already(document.data, path):
            _put(document.data, path, copy.deepcopy(value))


_MOVED: dict[str, Path] = {"task": ("task", "name"), "task_params": ("task", "params"), "rewards": ("rewards",)}
"""Keys of an evaluation set, and where the configuration of a run has them; the others are keys of [eval]."""


_WHOLE = {"heldout_fraction": 1.0, "heldout_path": None, "heldout_split": None}
"""Parameters with which a task holds out every row."""


def of_eval_set(document: Document, index: int, entry: EvalSet) -> Document:
    """The run's configuration with what entry `index` of `[[eval.sets]]` says instead."""
    found, at = fork(document), ("eval", "sets", index)
    del found.data["eval"]["sets"]
    for table, key in (("checkpoint", "best"), ("training", "stop_when")):  # which may name another set
        found.data.get(table, {}).pop(key, None)
    if entry.task is not None:
        found.data.pop("tasks", None)
        found.data["task"] = {}
        if registry.is_registered("task", entry.task):  # of a file that is named for evaluation every row is held out
            found.data["task"]["params"] = registry.find("task", entry.task).takes(_WHOLE)
    said = entry.model_dump(mode="json", exclude_defaults=True) | {"problems": entry.problems}
    for key in [key for key in said if key != "name"]:
        lay(found, _MOVED.get(key, ("eval", key)), said[key], document, (*at, key))
    return found


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value in `value` at `path` that is no table, with the keys that lead to it."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, inner in value.items():
        yield from leaves(inner, (*path, key))


def _set_already(data: Any, path: Path) -> Path:
    """The part of `path` at which the document has a value of its own, or ()."""
    for depth, part in enumerate(path, 1):
        if part not in data:
            return ()
        data = data[part]
        if not isinstance(data, dict):
            return path[:depth]
    return path


def _put(data: dict[str, Any], path: Path, value: Any) -> None:
    for part in path[:-1]:
        data = data.setdefault(str(part), {})
    data[str(path[-1])] = value
