"""Templates that show columns of a row of data, each as {name} or, nested, {name.inner}."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, cast

PLACE = re.compile(r"\{([A-Za-z_][\w.]*)\}")
"""A column in a template; empty braces do not name one."""


def column(row: Mapping[str, Any], name: str) -> list[Any]:
    """Return the value at a dotted name in a list of one; an empty list without it."""
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return []
        value = cast("Mapping[str, Any]", value)[part]
    return [value]


def as_text(value: Any) -> str:
    """Return a value as a template shows it: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
