"""Finds a component of this package that is missing from the table of built-in components."""

from __future__ import annotations

from pathlib import Path

from retrain.errors import ComponentError


def undeclared(kind: str, name: str) -> ComponentError | None:
    """Return an error that names the module with the component's decorator; None if there is no such module."""
    files = Path(__file__).parents[1].rglob("*.py") if name.isidentifier() else ()
    found = next((file for file in files if f'@{kind}("{name}"' in file.read_text(encoding="utf-8")), None)
    if found is None:
        return None
    fix = f'add the row "{name}" to "{kind}" in retrain/registry/built_in.py'
    return ComponentError(f"{found} declares the {kind} {name}, which has no row", fix)
