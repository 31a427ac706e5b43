"""Notices attributes of components that change during a run and that no checkpoint holds."""

from __future__ import annotations

from typing import Any

_LONGEST = 10_000
"""Number of characters of a container's text that are compared."""


def attributes(component: object) -> dict[str, Any]:
    """Return a value for each attribute of an object, which changes when the attribute does.

    An object of another class than tensors, numbers, texts and Python's containers is compared by its identity, so that
    a change inside it is not noticed.
    """
    return {name: _value(value) for name, value in vars(component).items()}


def _value(value: Any) -> Any:
    if isinstance(value, bool | int | float | str | bytes | None):
        return value
    if hasattr(value, "_version"):  # a tensor counts the changes in place
        return id(value), value._version
    if isinstance(value, list | tuple | dict | set | frozenset) or hasattr(value, "__len__"):
        # A copy would double the memory of a cache; its beginning shows most changes, and its length the rest.
        return type(value).__name__, len(value), repr(value)[:_LONGEST]
    return id(value)
