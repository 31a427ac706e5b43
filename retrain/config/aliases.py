"""Answer keys of other trainers with the keys that replace them here, which are listed in aliases.toml."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import date, time
from functools import cache
from pathlib import Path
from typing import Any, cast

import tomli


@cache
def aliases() -> Mapping[str, Any]:
    """Return the content of aliases.toml."""
    return tomli.loads(Path(__file__).with_name("aliases.toml").read_text("utf-8"))


@cache
def advice_by_key() -> Mapping[str, str | Mapping[str, str]]:
    """Return the advice for each key; a table if it depends on the value."""
    found: dict[str, str | Mapping[str, str]] = {key: text for text, keys in aliases()["keys"].items() for key in keys}
    return found | {key: entry["advice"] for entry in aliases()["by_value"] for key in entry["keys"]}


def translated(key: str, value: Any) -> str:
    """Return the advice what to write instead of another trainer's key or table, or "" for an unknown one."""
    tables = aliases()["tables"]
    if not isinstance(value, Mapping):
        advice = _advice("", key, value)
        return advice and f"{'write' if ' = ' in advice else 'here'} {advice}"
    inside = cast("Mapping[str, Any]", value) if key in tables["inside"] else {}
    if known := list(dict.fromkeys(filter(None, _inside(key, inside)))):
        return f"here {'; '.join(known)}"
    return f"here {tables[key]}" if key in tables else ""


def _inside(table: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the advice for every key in a table and in the tables inside it."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _inside(key, cast("Mapping[str, Any]", value))
        else:
            yield _advice(table, key, value)


def _advice(table: str, key: str, value: Any) -> str:
    found = advice_by_key().get(f"{table}.{key}") or advice_by_key().get(key, "")
    if isinstance(found, str):  # the user fills in tables and lists
        return found.replace("{value}", toml(value) if isinstance(value, bool | str | int | float) else "...")
    return found.get(str(value).lower().replace("-", "_")) or " or ".join(dict.fromkeys(found.values()))


def toml(value: Any) -> str:
    """Format a value as in TOML."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):  # dates, integers of thousands of digits, deep nesting
        return str(value) if isinstance(value, date | time) else f"this {type(value).__name__}"
