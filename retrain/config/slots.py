"""Keys of a configuration that name components."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from retrain import registry
from retrain.algorithms.transforms.token_stages import transform_chain
from retrain.config.positions import KeyPath
from retrain.config.presets import preset_names
from retrain.config.schema import Config

AUTO = "auto"
"""Value of `[rollout] engine` for which the model decides."""


MIXED = {
    "environments": {"environment": ("name", "params"), "task": ("task", "task_params")},
    "tasks": {"task": ("name", "params")},
}
"""For each section whose entries are mixed, and each kind: (the key of an entry that names the component, the key with
its parameters)."""


def labels(config: Config) -> tuple[str, ...]:
    """Return the labels of a run's environments; a single environment has the label ""."""
    return mixed_labels(config) if config.environments else ("",) if config.environment.name else ()


def mixed_labels(config: Config) -> tuple[str, ...]:
    """Return the labels of the entries of `[[environments]]` or `[[tasks]]`."""
    return tuple(entry.label or entry.name for entry in config.environments or config.tasks)


def needs_own_interpreter(config: Config, environment: str | None) -> bool:
    """Return True if only the interpreter of `[environment] python` can import the environment of this name."""
    return config.environment.python is not None and registry.is_dotted(str(environment))


@dataclass(frozen=True)
class Slot:
    """A place in the configuration that names a component.

    Attributes:
        kind: kind of the component.
        name: registered name or dotted path.
        path: path of the key that names the component.
        params_path, params: path and content of the table with parameters next to the name.
        inline: True if that table also serves registered names; otherwise only dotted paths.
        weight: weight of the entry; None if it sets none.
    """

    kind: str
    name: str
    path: KeyPath
    params_path: KeyPath = ()
    # Not compared: slots are keys of dicts, and a dict has no hash.
    params: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False)
    inline: bool = False
    weight: float | None = None


def slots(config: Config, tables: Mapping[str, Any]) -> Iterator[Slot]:
    """Yield every key that names a component: keys of sections, and parameters of tables annotated with a kind."""
    # The rule `mixture` refuses both sections beside each other.
    mix = next((section for section in MIXED if getattr(config, section)), "")
    yield from _expert_slots(config)
    for kind in registry.KINDS.values():
        mixed = MIXED[mix].get(kind.name) if mix else None
        section, key, params_key = (mix, *mixed) if mixed else (*(kind.key or ("", "")), kind.params)
        several = getattr(config, section, ())
        # A list of tables is a tuple of entries; a section is a single model.
        whole = not isinstance(several, tuple)
        for index, entry in enumerate((several,) if whole else several):
            around: KeyPath = (section,) if whole else (section, index)
            params = getattr(entry, params_key) if params_key else {}
            at = (*around, params_key) if params_key else ()
            # Its code is imported by the workers, whose interpreter has its packages.
            if kind.name == "environment" and needs_own_interpreter(config, getattr(entry, key)):
                continue
            for index_path, name in _named(kind.name, getattr(entry, key)):
                weight = None if mixed else getattr(entry, "weight", None)
                yield Slot(
                    kind.name, name, (*around, key, *index_path), at, params, bool(mixed) or key == "name", weight
                )
        # A parameter can name a component, too, such as [mix] sft_reduction.
        for component in registry.components(tables=tables):
            table = tables.get(component.table)
            for key, info in component.schema.model_fields.items():
                if kind in info.metadata and isinstance(table, dict) and isinstance(name := table.get(key), str):
                    yield Slot(kind.name, name, (component.table, key))


def _expert_slots(config: Config) -> Iterator[Slot]:
    """Yield a source for `[expert]`, or for each `[[expert]]`, that names a file."""
    for index, entry in enumerate(config.experts):
        if entry.path is not None:
            at: KeyPath = ("expert", index) if isinstance(config.expert, tuple) else ("expert",)
            yield Slot("source", "expert", (*at, "path"), at, entry.model_dump(), inline=True)


def _named(kind: str, value: str | tuple[str, ...] | None) -> Iterator[tuple[KeyPath, str]]:
    """Yield the component names in the value of a key with their indices; chains are expanded.

    Presets and "auto" are skipped, because they are not components.
    """
    nothing = {"engine": (AUTO,), "algorithm": preset_names()}.get(kind, ())
    if value is None or value in nothing:
        return
    names = transform_chain(value) if kind == "transform" else (value,) if isinstance(value, str) else value
    for index, name in enumerate(names):
        yield (() if isinstance(value, str) else (index,)), name


def needs_import(slot: Slot) -> bool:
    """Return True if finding the component imports new code: a dotted path, or an entry point not yet loaded."""
    imported = registry.is_dotted(slot.name) or slot.name in registry.names(slot.kind)
    return imported and not registry.is_registered(slot.kind, slot.name)
