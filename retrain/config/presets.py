"""Presets, such as `[algorithm] algorithm_mode = "dapo"`: TOML files whose keys are defaults of a configuration."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from retrain import registry
from retrain.config.document import Document, set_already
from retrain.config.positions import KeyPath, leaves
from retrain.errors import ConfigProblem

FOLDER = Path(__file__).parents[1] / "presets"


@dataclass(frozen=True)
class Preset:
    """A preset as applied to one configuration.

    Attributes:
        name, file: name and path of the preset.
        keys: every key of the preset -> its value in the preset.
        overridden: keys that the layer that names the preset, or one above, sets itself -> `FILE:LINE`.
        outranked: keys of layers below that the preset replaces -> where they are set.
        replaced: warnings about keys that a file sets to another value.
        unread: keys of the preset that nothing in the run reads.
    """

    name: str
    file: str
    keys: dict[str, Any] = field(default_factory=dict[str, Any])
    overridden: dict[str, str] = field(default_factory=dict[str, str])
    outranked: dict[KeyPath, ConfigProblem] = field(default_factory=dict[KeyPath, ConfigProblem])
    replaced: list[ConfigProblem] = field(default_factory=list[ConfigProblem])
    unread: list[KeyPath] = field(default_factory=list[KeyPath])


@cache
def preset_names() -> tuple[str, ...]:
    """Return the names of the built-in presets."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.toml")))


def preset_summary(name: str) -> str:
    """Return the summary of a preset: the first line of its file."""
    return (FOLDER / f"{name}.toml").read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def apply_task_settings(document: Document) -> None:
    """Add the settings that a registered task recommends (trait `settings`) and the document does not set."""
    section = document.data.get("task")
    name = section.get("name") if isinstance(section, dict) else None
    # Other code of the user is imported only after the schema is valid, and would set these keys too late.
    if not isinstance(name, str) or not registry.is_registered("task", name):
        return
    for path, value in leaves(registry.task.traits_of(registry.find("task", name)).settings):
        if not set_already(document.data, path):
            # The trait is shared by all configurations of the process.
            document.set(path, copy.deepcopy(value), {})
