"""The JSON Schema of a configuration file: completion and checks in an editor."""

from __future__ import annotations

from typing import Any

from retrain import registry
from retrain.algorithms.transforms import CHAINS
from retrain.config.document import ALIASES, show
from retrain.config.presets import preset_names
from retrain.config.schema import Config

_NAMED = {
    ("Algorithm", "advantage_mode"): "advantage",
    ("Algorithm", "transform_mode"): "transform",
    ("Algorithm", "algorithm_mode"): "algorithm",
    ("Algorithm", "uncertainty_kind"): "uncertainty",
    ("Algorithm", "reduction"): "reduction",
    ("Algorithm", "filter"): "filter",
    ("Task", "name"): "task",
    ("Reward", "name"): "reward",
    ("Loss", "name"): "loss",
    ("Rollout", "engine"): "engine",
    ("Logging", "trackers"): "tracker",
}
"""(model, key) -> the kind of component that the key names."""


def json_schema() -> dict[str, Any]:
    """Sections, and the table of every registered component. A dotted path is valid wherever a name is."""
    schema = Config.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    for (model, key), kind in _NAMED.items():
        also = {"transform": tuple(CHAINS), "algorithm": preset_names()}.get(kind, ())
        names = registry.names(kind)
        definitions[model]["properties"][key]["examples"] = [*(name for name in also if name not in names), *names]
    for name, readers in registry.table_names().items():
        table = registry.table_schema(readers).model_json_schema()
        definitions |= table.pop("$defs", {})
        schema["properties"][name] = table | {"description": _used_by(readers)}
    for alias, key in ALIASES.items():
        _add_alias(schema, str(alias[0]), str(alias[1]), f"The same as {show(key)}.")
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **schema, "title": "retrain configuration"}


def _used_by(readers: list[registry.Component]) -> str:
    return "Parameters of " + ", ".join(f"{reader.kind} {reader.name}" for reader in readers)


def _add_alias(schema: dict[str, Any], table: str, key: str, description: str) -> None:
    target: dict[str, Any] = schema["properties"].get(table, {})
    if "$ref" in target:
        target = schema["$defs"][target["$ref"].rsplit("/", 1)[1]]
    target.get("properties", {})[key] = {"description": description}
