"""Templates with placeholders for columns of a row of data: {name}, or {name.inner} for a nested column."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.]*)\}")
"""A placeholder in a template. Empty braces are plain text."""


def column(row: Mapping[str, Any], name: str) -> list[Any]:
    """Return a list with the value at a dotted name; an empty list if the row has no such value."""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return []
        value = cast("Mapping[str, Any]", value)[part]
    # A list, because the value itself may be None.
    return [value]


def as_text(value: Any) -> str:
    """Return a value as a template shows it: a text unchanged, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
