"""The JSON Schema of a configuration file: completion and checks in an editor."""

from __future__ import annotations

from typing import Any

from retrain import registry
from retrain.algorithms.transforms import CHAINS
from retrain.config.document import aliases, show
from retrain.config.presets import preset_names
from retrain.config.resolve import AUTO, MIXED
from retrain.config.schema import Config

_DOTTED = "[.:]"
"""What a dotted path has and no registered name."""


def json_schema() -> dict[str, Any]:
    """Sections, and the table of every registered component. A dotted path is valid wherever a name is."""
    schema = Config.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    for kind in registry.KINDS.values():
        section, key = kind.key or ("", "")
        if section in Config.model_fields:
            also = {"transform": tuple(CHAINS), "algorithm": preset_names(), "engine": (AUTO,)}.get(kind.name, ())
            names = list(dict.fromkeys((*also, *registry.names(kind.name))))
            mixes = [(mix, keys[kind.name][0]) for mix, keys in MIXED.items() if kind.name in keys]
            for table, named in ((section, key), *mixes):
                keys = _table(schema, table)["properties"]
                keys[named] = _choice(keys[named], names)
    for name, readers in registry.table_names().items():
        table = registry.table_schema(readers).model_json_schema()
        definitions |= table.pop("$defs", {})
        schema["properties"][name] = table | {"description": _used_by(readers)}
    for alias, key in aliases().items():
        first: dict[str, Any] = _table(schema, str(key[0]))["properties"][str(key[1])]
        said = {"description": f"The same as {show(key)}."}
        _table(schema, str(alias[0])).get("properties", {})[alias[1]] = first | said
    dialect = "https://json-schema.org/draft/2020-12/schema"
    own = {"patternProperties": {_DOTTED: {"type": "object"}}}
    return {"$schema": dialect, **schema, **own, "title": "retrain configuration"}


def _choice(schema: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The schema of a key that names a component: every text in it is one of `names` or a dotted path."""
    if schema.get("type") == "string":
        kept = {key: value for key, value in schema.items() if key not in ("type", "minLength")}
        return kept | {"anyOf": [{"enum": names}, {"type": "string", "pattern": _DOTTED}]}
    if "items" in schema:
        return schema | {"items": _choice(schema["items"], names)}
    return schema | {"anyOf": [_choice(one, names) for one in schema["anyOf"]]} if "anyOf" in schema else schema


def _used_by(readers: list[registry.Component]) -> str:
    return "Parameters of " + ", ".join(f"{reader.kind} {reader.name}" for reader in readers)


def _table(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """The schema of a table, or of the entries of a list of tables; {} if there is none."""
    found: dict[str, Any] = schema["properties"].get(name, {})
    found = found.get("items", found)
    return schema["$defs"][found["$ref"].rsplit("/", 1)[1]] if "$ref" in found else found
