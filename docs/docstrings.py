"""What docstrings say of parameters, and defaults as TOML."""

from __future__ import annotations

import inspect
import re
from typing import Any


def sentence(text: str) -> str:
    """With a capital letter, unless it begins with a symbol such as `c`."""
    return text[:1].upper() + text[1:] if re.match(r"[a-z][a-z ]", text) else text


def meanings_of(target: Any) -> dict[str, str]:
    """What the docstrings of a function, or of a class and its bases, say of each parameter."""
    found: dict[str, str] = {}
    for owner in reversed(inspect.getmro(target)) if inspect.isclass(target) else (target,):
        found |= arguments(owner.__doc__ or "")
    return found


def arguments(docstring: str) -> dict[str, str]:
    """What `Args:` says of each name; one line may hold `a: ...; b: ...`, and `a, b: ...` names two."""
    block = re.search(r"Args:\n(.*?)(?:\n\S|\Z)", inspect.cleandoc(docstring), re.DOTALL)
    entries = re.split(r"(?:^ {4}|; |\. )(?=\w+(?:, \w+)*: )", block[1] if block else "", flags=re.MULTILINE)
    found: dict[str, str] = {}
    for entry in entries:
        names, _, meaning = entry.partition(": ")
        found |= dict.fromkeys(names.split(", "), sentence(" ".join(meaning.split())))
    return found


def toml(value: Any) -> str:
    """A default as it would be written."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(item)}" for key, item in value.items() if item not in (None, {})) + "}"
    return f"{value:g}" if isinstance(value, float) else str(value)
