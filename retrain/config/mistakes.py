"""Translate pydantic's validation errors into problems with fixes, and keys of other trainers into ours."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import date, time
from difflib import get_close_matches
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, cast, get_args

import tomli
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from typing_extensions import is_typeddict

from retrain.config.document import Document
from retrain.config.positions import BARE_KEY, KeyPath
from retrain.errors import did_you_mean
from retrain.registry.built_in import ALIASES

Catalog = dict[tuple[str, ...], list[str]]
"""Path of a table -> its keys; `()` -> the names of the tables."""

_TYPES = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string in quotes",
    "tuple_type": "a list",
    "list_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
}
_BOUNDS = {"greater_than": ">", "greater_than_equal": ">=", "less_than": "<", "less_than_equal": "<="}
_MODEL_NAMES = ("name", "name_or_path", "model_name", "model_name_or_path")
"""Names of other trainers for `[model] path`. In other tables, `name` is a key of ours."""
_SIMILARITY = 0.85
"""Least similarity of a misspelled key to one of another trainer, in [0, 1]."""
_LENGTHS = {"too_short": "give at least {min_length}", "too_long": "give at most {max_length}"}


def catalog(tables: Mapping[str, Any]) -> Catalog:
    """List the valid keys of every table, for "did you mean".

    Args:
        tables: name of a table -> its pydantic model or annotation.
    """
    keys_of_tables: Catalog = {(): list(tables)}
    for name, model in tables.items():
        keys_of_tables |= dict(_models((name,), model))
    # An alias is a valid key where it is written, and must not be called unknown.
    for alias in ALIASES:
        keys_of_tables.setdefault((str(alias[0]),), []).append(str(alias[1]))
    return keys_of_tables


def collect(
    document: Document,
    error: ValidationError,
    valid_keys: Catalog,
    locate: Callable[[KeyPath], KeyPath] = lambda path: path,
) -> list[KeyPath]:
    """Record all errors of a failed validation in `document`, and return the paths of the invalid values.

    Args:
        document: the configuration.
        error: error of pydantic.
        valid_keys: valid keys, for "did you mean".
        locate: maps pydantic's location in the validated value to the path in the document.
    """
    details_at: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors(include_url=False):
        path = locate(detail["loc"])
        # The data do not contain a missing key, so its location is kept as pydantic reports it.
        details_at.setdefault(path if detail["type"] == "missing" else _existing(document.data, path), []).append(
            detail
        )
    # pydantic reports every alternative of a union; the user meant the one that fails at the innermost value.
    outer = {path[:depth] for path in details_at for depth in range(len(path))}
    for path in (path for path in details_at if path not in outer):
        document.refuse(path, *_describe(document, path, details_at[path], valid_keys))
    return list(details_at)


def _models(path: tuple[str, ...], annotation: Any) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield the path of every pydantic model and typed dict inside an annotation, with its keys."""
    if is_typeddict(annotation):
        yield path, list(annotation.__annotations__)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield path, list(annotation.model_fields)
        for name, info in annotation.model_fields.items():
            yield from _models((*path, name), info.annotation)
    else:
        for part in get_args(annotation):
            yield from _models(path, part)


def _existing(data: Any, location: KeyPath) -> KeyPath:
    """Return the part of pydantic's location that exists in the data, without names of union members."""
    path: KeyPath = ()
    part: Any
    for part in location:
        if part in (data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()):
            data = data[part]
            path = (*path, part)
    return path


def _describe(document: Document, path: KeyPath, details: list[ErrorDetails], valid_keys: Catalog) -> tuple[str, str]:
    # Several details at a path are the alternatives of a union. They usually differ only in the type they want.
    detail = details[0]
    kind = detail["type"]
    value = detail["input"]
    context = detail.get("ctx", {})
    shown = document.typed.get(path) or _toml(value)
    if kind == "extra_forbidden":
        return unknown_key(path, value, valid_keys, document.data)
    if kind == "missing":
        return "is missing", f"add {path[-1]} = ..." if isinstance(path[-1], str) else "make the list one longer"
    if kind in _LENGTHS:
        # "too_short" -> "short"
        return f"{shown} is too {kind[4:]}", _LENGTHS[kind].format(**context)
    if kind == "literal_error":
        # pydantic has the names only in a text: "'a', 'b' or 'c'".
        names = [name.strip("'") for name in str(context["expected"]).replace(" or ", ", ").split(", ")]
        fix = f"{did_you_mean(str(value), names)} use one of {', '.join(map(_toml, names))}".lstrip()
        return f"{shown} is not a valid value", fix
    if kind in _BOUNDS:
        bound = f"{_BOUNDS[kind]} {next(iter(context.values()))}"
        return f"{shown} is out of range", f"use a value {bound}"
    wanted = " or ".join(dict.fromkeys(_TYPES[item["type"]] for item in details if item["type"] in _TYPES))
    if wanted:
        return f"must be {wanted}, not {shown}", _retype(path, wanted, value)
    # The value begins our message, in place of pydantic's first word.
    message = re.sub(r"^(Input|String|Value error,) ", "", detail["msg"])
    return f"{shown}: {message}", "change the value"


def close(table: str, valid_keys: Catalog) -> bool:
    """Return True if a table's name resembles that of a known table, or is a key of one."""
    return bool(did_you_mean(table, valid_keys[()])) or any(table in keys for keys in valid_keys.values())


def unknown_key(path: KeyPath, value: Any, valid_keys: Catalog, data: Any) -> tuple[str, str]:
    """Return problem and fix of an unknown key: an alias of another trainer, a typo, the wrong table, or neither.

    A parameter of a component that the file names comes first: `beta` is dca's own beside
    `advantage_mode = "dca"`, and otherwise TRL's weight of the KL term.

    Args:
        path: the key.
        value: its value.
        valid_keys: valid keys by table.
        data: the configuration, whose texts name its components.
    """
    from retrain.config.schema import Config

    key, is_table = str(path[-1]), isinstance(value, dict)
    table = tuple(part for part in path[:-1] if isinstance(part, str))
    siblings = valid_keys.get(table, [])
    owners = [owner for owner, keys in valid_keys.items() if key in keys and owner != table]
    if named := [owner for owner in owners if owner and owner[-1] in _names(data)]:
        owners = named
    elif path[:-1] == ("model",) and key in _MODEL_NAMES:
        return "is a key of another trainer", f"write [model] path = {_toml(value)}"
    elif here := translated(key, value):
        return "is a key of another trainer", here
    near = did_you_mean(key, siblings, nearest(key, value), cutoff=0.75)
    if near and not owners and not is_table:
        return "unknown key", near
    if owners:
        places = " or ".join(f"[{'.'.join(owner)}]" for owner in owners[:3])
        return "unknown key here", f"{key} belongs {f'in {places}' if owners[0] else 'at the top level'}"
    fix = f"keys of [{'.'.join(table)}]: {', '.join(siblings) or 'none'}"
    if not table:
        sections = sorted(name for name in siblings if name in Config.model_fields)
        fix = f"sections: {', '.join(sections)}; a component's table has its name, and is listed by `retrain plugins`"
        fix = fix if is_table else "put every key into a table, such as [training]"
    problem = "unknown table" if is_table and not table else "unknown key"
    return problem, did_you_mean(key, siblings, fix)


def _names(data: Any) -> set[str]:
    """Return the texts in a configuration, and the parts of those such as "gtpo_sepa"."""
    if isinstance(data, str):
        return {data, *data.split("_")}
    inner = cast("dict[str, Any]", data).values() if isinstance(data, dict) else ()
    inner = cast("list[Any]", data) if isinstance(data, list) else inner
    return {name for value in inner for name in _names(value)}


def _retype(path: KeyPath, wanted: str, value: Any) -> str:
    """Return the fix for a value of the wrong type, with the corrected value if it can be derived."""
    key = path[-1] if isinstance(path[-1], str) else "the item"
    if "table" in wanted:
        if isinstance(path[-1], int):
            return "write it in braces, as { key = value }"
        names = ".".join(str(part) for part in path)
        return f"write [{names}] on a separate line, and its keys below"
    if wanted == "true or false":
        return f"write {key} = true or {key} = false"
    if "string" in wanted:
        return f"write {key} = {_toml(str(value))}" if not isinstance(value, (list, dict)) else "give a single string"
    if wanted == "a list":
        # "a, b" is what a user writes who does not know that TOML has lists.
        items = value.split(",") if isinstance(value, str) else [value]
        return f"write {key} = [{', '.join(_toml(_number(item)) for item in items)}]"
    if isinstance(value, str) and not isinstance(number := _number(value), str):
        return f"write {key} = {number}, without quotes"
    if isinstance(value, float) and value.is_integer():
        return f"write {key} = {int(value)}"
    return f"write {key} = a number" if wanted == "a number" else f"write {key} = a whole number"


def _number(value: Any) -> Any:
    """Return the finite number that a text spells, as 1e-05 for ".00001"; anything else as it is."""
    with suppress(ValueError):
        if isinstance(value, str) and isfinite(float(value)):
            # As a float, 1 would be written as 1.0, and a long integer would lose digits.
            return int(value) if value.strip().isdecimal() else float(value)
    return value


@cache
def aliases() -> Mapping[str, Any]:
    """Return the content of aliases.toml."""
    return tomli.loads(Path(__file__).with_name("aliases.toml").read_text("utf-8"))


@cache
def advice_by_key() -> Mapping[str, str | Mapping[str, str]]:
    """Return the advice for each key; a table if it depends on the value."""
    advice: dict[str, str | Mapping[str, str]] = {key: text for text, keys in aliases()["keys"].items() for key in keys}
    return advice | {key: entry["advice"] for entry in aliases()["by_value"] for key in entry["keys"]}


def translated(key: str, value: Any) -> str:
    """Return the advice what to write instead of another trainer's key or table, or "" for an unknown one."""
    tables = aliases()["tables"]
    if not isinstance(value, Mapping):
        advice = _advice("", key, value)
        # Advice with an assignment can be copied; other advice explains.
        return advice and f"{'write' if ' = ' in advice else 'here'} {advice}"
    inside = cast("Mapping[str, Any]", value) if key in tables["inside"] else {}
    if inner_advice := list(dict.fromkeys(filter(None, _inside(key, inside)))):
        return f"here {'; '.join(inner_advice)}"
    return f"here {tables[key]}" if key in tables else ""


def nearest(key: str, value: Any) -> str:
    """Return a suggestion for a misspelled key of another trainer, or "" if none is similar."""
    near = next(iter(get_close_matches(key, advice_by_key(), 1, _SIMILARITY)), "")
    return near and f'did you mean "{near}" of another trainer? {translated(near, value)}'


def _inside(table: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the advice for every key in a table and in the tables inside it."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _inside(key, cast("Mapping[str, Any]", value))
        else:
            yield _advice(table, key, value)


def _advice(table: str, key: str, value: Any) -> str:
    advice = advice_by_key().get(f"{table}.{key}") or advice_by_key().get(key, "")
    if isinstance(advice, str):  # the user fills in tables and lists
        return advice.replace("{value}", toml(value) if isinstance(value, bool | str | int | float) else "...")
    # One key of aliases.toml serves several spellings, such as "token-mean" and "token_mean".
    return advice.get(str(value).lower().replace("-", "_")) or " or ".join(dict.fromkeys(advice.values()))


def toml(value: Any) -> str:
    """Format a value as in TOML, tables in braces."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        pairs = [f"{key if BARE_KEY.fullmatch(key) else json.dumps(key)} = {toml(item)}" for key, item in items]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, cast('list[Any]', value)))}]"
    # TOML writes dates, nan and inf as Python does. JSON differs, but has the same strings, numbers and booleans.
    as_python = isinstance(value, date | time) or (isinstance(value, float) and not isfinite(value))
    return str(value) if as_python else json.dumps(value, ensure_ascii=False)


def _toml(value: Any) -> str:
    """Format a value as in TOML, shortened to 60 characters."""
    text = toml(value)
    return text if len(text) <= 60 else text[:57] + "..."
