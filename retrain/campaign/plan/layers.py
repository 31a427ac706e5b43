"""Laying one configuration over another, so that every value keeps the place where it was written."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from retrain.config.document import Document, aliases, show
from retrain.config.positions import Path


def fork(document: Document) -> Document:
    """A copy with the same values and places; a change of either leaves the other as it is."""
    lists = {"problems": [*document.problems], "warnings": [*document.warnings]}
    return replace(document, data=copy.deepcopy(document.data), places={**document.places}, **lists)


def lay(document: Document, path: Path, value: Any, source: Document, at: Path) -> None:
    """Set `value` at `path` as written at `at` in `source`; tables are laid key by key, anything else is replaced."""
    if isinstance(value, dict):
        if at in source.places:
            document.places.setdefault(path, source.places[at])
        _table(document, path)
        for key, inner in value.items():
            lay(document, (*path, key), inner, source, (*at, key))
        return
    path = aliases().get(path, path)
    table = _table(document, path[:-1])
    if table is None:
        document.problems.append(source.at(at, f"{show(path[:-1])} is not a table", "name a key of a table"))
        return
    table[str(path[-1])] = copy.deepcopy(value)
    for below in [known for known in document.places if known[: len(path)] == path]:
        del document.places[below]
    for known in [known for known in source.places if known[: len(at)] == at]:
        document.places[(*path, *known[len(at) :])] = source.places[known]


def _table(document: Document, path: Path) -> dict[str, Any] | None:
    """The table at `path`, made where it is missing; None where something else is."""
    node: Any = document.data
    for part in path:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            return None
    return node
