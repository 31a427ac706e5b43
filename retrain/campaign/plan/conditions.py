"""Expand `[campaign]` into conditions: entries x grid (x tasks), each a complete configuration of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from retrain.campaign.plan.campaign_schema import Campaign, ConditionEntry
from retrain.config.document import Document, fork, merge, overlay
from retrain.config.positions import KeyPath, leaves
from retrain.config.schema import Algorithm

_STANDARD = [
    ConditionEntry.model_validate({"advantage_mode": advantage, "transform_mode": transform})
    for advantage, transform in (("grpo", "none"), *product(["maxrl"], ("none", "gtpo", "gtpo_hicra", "gtpo_sepa")))
]
"""The conditions of a campaign without `[[campaign.conditions]]`."""

Change = tuple[KeyPath, Any, KeyPath]
"""A key of the run, its value, and its place in the campaign file."""

_MODES = ("algorithm.algorithm_mode", "algorithm.advantage_mode", "algorithm.transform_mode")
_MAX_CONDITIONS = 200
"""Largest number of conditions: each is validated, and compared with all others, before the first run."""
_FOLDER = re.compile(r"[^A-Za-z0-9._+=,-]+")
"""Characters of a label that a directory name does not keep."""


@dataclass(frozen=True)
class Condition:
    """A configuration that a campaign compares with others; it is run once for each seed.

    Attributes:
        method: name of the condition, the same on each task.
        overrides: changes to the base run, dotted key -> value.
        document: the base run with those changes.
        at: entry of the campaign file that defines the condition.
        against: label of the condition that it extends, if the file names one.
        task: task of its runs, in a campaign with tasks.
        seed_offset: added to the seed of each of its runs.
    """

    method: str
    overrides: Mapping[str, Any]
    document: Document
    at: KeyPath
    against: str | None = None
    task: str = ""
    seed_offset: int = 0

    @property
    def label(self) -> str:
        """Name in tables; in a campaign with tasks the task comes first: `rare: grpo`."""
        return f"{self.task}: {self.method}" if self.task else self.method

    @property
    def folder(self) -> str:
        """Label as a valid directory name."""
        return _FOLDER.sub("-", self.label).strip(".-") or "condition"


def conditions(settings: Campaign, source: Document, base: Document) -> list[Condition]:
    """Return the conditions in the order of the file, for each task; errors are recorded in `source`."""
    if settings.tasks:
        return [
            condition
            for index, task in enumerate(settings.tasks)
            for condition in _on_task(task, index, settings, source, base)
        ]
    return _conditions(settings, source, base)


def _on_task(task: str, index: int, settings: Campaign, source: Document, base: Document) -> Iterator[Condition]:
    """Yield the conditions on one task; errors are recorded for the first task only, as all tasks share them."""
    base_of_task = fork(base)
    merge(base_of_task, ("task", "name"), task, source, ("campaign", "tasks", index))
    for condition in _conditions(settings, source if index == 0 else fork(source), base_of_task):
        against = condition.against and f"{task}: {condition.against}"
        yield replace(condition, against=against, task=task)


def _conditions(settings: Campaign, source: Document, base: Document) -> list[Condition]:
    expanded: list[Condition] = []
    axes = list(_axes(settings, source))
    entries = settings.conditions or _STANDARD
    if (count := len(entries) * prod(map(len, axes)) * max(1, len(settings.tasks))) > _MAX_CONDITIONS:
        where: KeyPath = ("campaign", "grid") if axes else ("campaign",)
        problem = f"the campaign has {count} conditions"
        source.refuse(where, problem, f"use at most {_MAX_CONDITIONS}, or split it into several campaigns")
        return []
    for index, entry in enumerate(entries):
        at: KeyPath = ("campaign", "conditions", index) if settings.conditions else ("campaign",)
        changes = dict(entry.model_extra or {})
        if changes.pop("name", None) is not None:
            source.refuse((*at, "name"), "unknown key", 'did you mean "label"?')
        edits = [(_path(key), value, (*at, key)) for key, value in changes.items()]
        for path, value, place_of_key in edits:
            for leaf, fix in owned(path, value, settings):
                source.refuse((*place_of_key, *leaf[len(path) :]), "the campaign sets this", fix)
        name = entry.label or _label(_flat(edits))
        for point in product(*axes):
            document = fork(base)
            overlay(document, edits, source)
            overlay(document, point, source)
            suffix = "".join(f",{path[-1]}={_short(value)}" for path, value, _ in point)
            against = entry.against and entry.against + suffix
            expanded.append(
                Condition(name + suffix, _flat([*edits, *point]), document, at, against, seed_offset=entry.seed_offset)
            )
    return expanded


def rungs(compared: Sequence[Condition], facts: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Pair each condition but the first with the condition that it extends: (condition, against).

    If the file names none, it is the earlier condition that differs in the fewest settings and components, and the
    first of them if several differ equally. For example, gtpo_sepa extends gtpo and not gtpo_hicra; a condition that
    replaces a setting of the baseline by another value extends the baseline, whatever values others have there.

    Args:
        compared: conditions in order.
        facts: resolved configuration of each condition.
    """
    described = [_described(resolved) for resolved in facts]
    pairs: list[tuple[str, str]] = []
    for index, condition in enumerate(compared[1:], start=1):
        nearest = min(range(index), key=lambda before: len(described[before] ^ described[index]))
        pairs.append((condition.label, condition.against or compared[nearest].label))
    return pairs


def _described(facts: Mapping[str, Any]) -> set[str]:
    """Return the settings and components of a run, as one string for each."""
    components = {name: bound for name, bound in facts["components"].items() if name != "tracker"}
    rest = {name: table for name, table in facts.items() if name not in ("components", "logging", "algorithm")}
    settings = {f"{'.'.join(map(str, path))}={value!r}" for path, value in leaves(rest)}
    return settings | {f"{kind} {component!r}" for kind, several in components.items() for component in several}


def _axes(settings: Campaign, source: Document) -> Iterator[list[Change]]:
    """Yield each axis of the grid as a list of alternative changes."""
    for at, values in leaves(settings.grid, ("campaign", "grid")):
        path = tuple(part for name in at[2:] for part in _path(str(name)))
        if not isinstance(values, list) or not values:
            source.refuse(at, "an axis must be a list of values", f'write "{".".join(map(str, path))}" = [..., ...]')
            continue
        for index, value in enumerate(values):
            for leaf, fix in owned(path, value, settings):
                source.refuse((*at, *leaf[len(path) :]), "the campaign sets this", fix)
            if value in values[:index]:
                source.refuse((*at, index), f"{_short(value)} is listed twice", "remove one of the two")
        yield [(path, value, (*at, index)) for index, value in enumerate(values) if value not in values[:index]]


def owned(path: KeyPath, value: Any, settings: Campaign | None = None) -> Iterator[tuple[KeyPath, str]]:
    """Yield the keys in `value` at `path` that only the campaign may set, each with the fix.

    Args:
        path: key of the run.
        value: value of that key, possibly a table.
        settings: include keys that a condition must not set; None: only those that `--set` must not set either.
    """
    keys = {
        "training.seed": "list the seeds in [campaign] seeds",
        "logging.name": "set [campaign] name, or the label of a condition",
    }
    if settings is not None:
        keys["logging.dir"] = "set it in [logging], for all runs"
        if settings.tasks:
            keys["task.name"] = "list the tasks in [campaign] tasks"
        if settings.max_steps is not None:
            keys["training.max_steps"] = "remove it, or [campaign] max_steps"
    for leaf, _ in leaves(value, path):
        yield from ((leaf, fix) for key, fix in keys.items() if within(".".join(map(str, leaf)), key))


def within(key: str, table: str) -> bool:
    """Return True if a dotted key is `table` itself or lies in it."""
    return f"{key}.".startswith(f"{table}.")


def _path(key: str) -> KeyPath:
    """Split `gtpo.beta` into (gtpo, beta); put a bare key of [algorithm] into that table."""
    return ("algorithm", key) if key in Algorithm.model_fields else tuple(key.split("."))


def _flat(changes: Sequence[Change]) -> dict[str, Any]:
    """Return changes as dotted key -> value."""
    changed = [leaf for path, value, _ in changes for leaf in leaves(value, path)]
    return {".".join(map(str, path)): value for path, value in changed}


def _label(overrides: Mapping[str, Any]) -> str:
    """Return a label such as maxrl+gtpo or maxrl+gtpo,beta=0.2: the modes, then the other keys."""
    algorithm, advantage, transform = (overrides.get(mode) for mode in _MODES)
    stages = transform if isinstance(transform, list) else [transform]
    modes = [algorithm] if algorithm else [name for name in (advantage, *stages) if name not in (None, "none")]
    names = [str(name).replace(":", ".").rpartition(".")[2] for name in modes]
    rest = [f"{key.rpartition('.')[2]}={_short(value)}" for key, value in overrides.items() if key not in _MODES]
    return ",".join(part for part in ("+".join(names), *rest) if part) or "base"


def _short(value: Any) -> str:
    if isinstance(value, str) and value.isprintable():
        return value
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)
