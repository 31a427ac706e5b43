"""JSON Schema of a configuration file, for completion and checks in an editor."""

from __future__ import annotations

from typing import Any

from retrain import registry
from retrain.algorithms.transforms.token_stages import CHAINS
from retrain.config.document import EXTENDS, show
from retrain.config.presets import preset_names
from retrain.config.schema import Config
from retrain.config.slots import AUTO, MIXED
from retrain.registry.built_in import ALIASES

_DOTTED = "[.:]"
"""Pattern of dotted paths: a registered name has neither a dot nor a colon."""


def json_schema() -> dict[str, Any]:
    """Return the schema of all sections and of the tables of registered components.

    A dotted path is valid wherever a registered name is.
    """
    schema = Config.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    for kind in registry.KINDS.values():
        section, key = kind.key or ("", "")
        if section in Config.model_fields:
            # These keys also accept names that are not components.
            also = {"transform": tuple(CHAINS), "algorithm": preset_names(), "engine": (AUTO,)}.get(kind.name, ())
            # "sepa" is the name of a chain and of a transform, and the values of an enum must differ.
            names = list(dict.fromkeys((*also, *registry.names(kind.name))))
            mixes = [(mix, keys[kind.name][0]) for mix, keys in MIXED.items() if kind.name in keys]
            for table, named in ((section, key), *mixes):
                keys = _table(schema, table)["properties"]
                keys[named] = _choice(keys[named], names)
    for name, readers in registry.table_names().items():
        if name in Config.model_fields:  # the section defines its keys
            continue
        table = registry.table_schema(readers).model_json_schema()
        definitions |= table.pop("$defs", {})
        read_by = ", ".join(f"{reader.kind} {reader.name}" for reader in readers)
        schema["properties"][name] = table | {"description": f"Parameters of {read_by}"}
    for alias, key in ALIASES.items():
        first: dict[str, Any] = _table(schema, str(key[0]))["properties"][str(key[1])]
        description = {"description": f"Alias of {show(key)}."}
        _table(schema, str(alias[0])).get("properties", {})[alias[1]] = first | description
    dialect = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"][EXTENDS] = {
        "type": "string",
        "description": "Another file; the keys of this file override its keys.",
    }
    dotted_tables = {"patternProperties": {_DOTTED: {"type": "object"}}}
    return {"$schema": dialect, **schema, **dotted_tables, "title": "retrain configuration"}


def _choice(schema: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return the schema of a key that names a component: each string is one of `names` or a dotted path."""
    if schema.get("type") == "string":
        # The alternatives of `anyOf` state the type themselves.
        kept = {key: value for key, value in schema.items() if key not in ("type", "minLength")}
        return kept | {"anyOf": [{"enum": names}, {"type": "string", "pattern": _DOTTED}]}
    if "items" in schema:
        return schema | {"items": _choice(schema["items"], names)}
    return (
        schema | {"anyOf": [_choice(alternative, names) for alternative in schema["anyOf"]]}
        if "anyOf" in schema
        else schema
    )


def _table(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the schema of a table, or of the entries of a list of tables; {} if the table does not exist."""
    table: dict[str, Any] = schema["properties"].get(name, {})
    table = table.get("items", table)
    return schema["$defs"][table["$ref"].rsplit("/", 1)[1]] if "$ref" in table else table
