"""The JSON Schema of a configuration file: completion and checks in an editor."""

from __future__ import annotations

from typing import Any

from retrain import registry
from retrain.algorithms.transforms import CHAINS
from retrain.config.document import aliases, show
from retrain.config.presets import preset_names
from retrain.config.resolve import MIXED
from retrain.config.schema import Config


def json_schema() -> dict[str, Any]:
    """Sections, and the table of every registered component. A dotted path is valid wherever a name is."""
    schema = Config.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    for kind in registry.KINDS.values():
        section, key = kind.key or ("", "")
        if section in Config.model_fields:
            also = {"transform": tuple(CHAINS), "algorithm": preset_names()}.get(kind.name, ())
            examples = list(dict.fromkeys((*also, *registry.names(kind.name))))
            _table(schema, section)["properties"][key]["examples"] = examples
            for mix, keys in MIXED.items():
                if kind.name in keys:
                    _table(schema, mix)["properties"][keys[kind.name][0]]["examples"] = examples
    for name, readers in registry.table_names().items():
        table = registry.table_schema(readers).model_json_schema()
        definitions |= table.pop("$defs", {})
        schema["properties"][name] = table | {"description": _used_by(readers)}
    for alias, key in aliases().items():
        _add_alias(schema, str(alias[0]), str(alias[1]), f"The same as {show(key)}.")
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **schema, "title": "retrain configuration"}


def _used_by(readers: list[registry.Component]) -> str:
    return "Parameters of " + ", ".join(f"{reader.kind} {reader.name}" for reader in readers)


def _add_alias(schema: dict[str, Any], table: str, key: str, description: str) -> None:
    _table(schema, table).get("properties", {})[key] = {"description": description}


def _table(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """The schema of a table, or of the entries of a list of tables; {} if there is none."""
    found: dict[str, Any] = schema["properties"].get(name, {})
    found = found.get("items", found)
    return schema["$defs"][found["$ref"].rsplit("/", 1)[1]] if "$ref" in found else found
