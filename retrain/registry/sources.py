"""Hashes of the user's code, which a resumed run compares with those of the original run."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, resolve_name
from pathlib import Path

from retrain.errors import ComponentError
from retrain.registry.component import Component

_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = __name__.partition(".")[0]


def source_hashes(components: Iterable[Component]) -> dict[str, str]:
    """Hash the user's modules that define `components`, and the user's modules that these import.

    Imports from this package and from installed packages are not followed, except within the
    package of a plug-in. Dynamic imports are not found.

    Args:
        components: the components of a run.
    Returns:
        The first 16 hexadecimal digits of each module's SHA-256, by module name.
    """
    return module_hashes([str(getattr(component.target, "__module__", "")) for component in components])


_imported: dict[str, tuple[ModuleSpec | None, str]] = {}
"""Module of the user -> (its spec, which a reload replaces; hash of its file when it was first seen)."""


def module_hashes(names: Iterable[str]) -> dict[str, str]:
    """Return the hashes of modules and of the user's modules that they import, as `source_hashes`.

    Raises:
        ComponentError: a file has changed since its module was imported, as in a notebook, so that its hash would
            certify code that does not run.
    """
    waiting = list(dict.fromkeys(names))
    hashes: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        spec = _find_spec(name)
        if name in hashes or name.partition(".")[0] == _OWN or spec is None or not spec.origin:
            continue
        file = Path(spec.origin)
        if not file.is_file():
            continue
        data = file.read_bytes()
        # 64 bits: a chance collision is out of the question, and the record stays readable.
        hashes[name] = hashlib.sha256(data).hexdigest()[:16]
        loaded_spec, loaded_hash = _imported.setdefault(name, (spec, hashes[name]))
        # A reload makes another spec: the new file is what runs.
        if loaded_spec is not spec:
            _imported[name] = (spec, hashes[name])
        elif loaded_hash != hashes[name]:
            problem = f"{file} has changed since this process imported it"
            raise ComponentError(problem, f"restart Python, or importlib.reload({name})")
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        waiting += [other for other in _imports(data, package) if other not in hashes and _is_user_module(other, name)]
    return dict(sorted(hashes.items()))


def _find_spec(name: str) -> ModuleSpec | None:
    """Find the spec of a module, which imports its parent packages; return None if there is no such module."""
    module = sys.modules.get(name)
    if module is not None:
        return module.__spec__
    with suppress(Exception):  # importing a package may raise anything
        return find_spec(name)
    return None


def _is_user_module(name: str, importer: str) -> bool:
    """Return whether a module that `importer` imports belongs to the same package or is not installed."""
    top = name.partition(".")[0]
    if top != importer.partition(".")[0] and is_installed(_find_spec(top)):
        return False
    spec = _find_spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).is_file()


def is_installed(spec: ModuleSpec | None) -> bool:
    """Return whether a top-level module is part of Python or of an installed package."""
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    paths = [Path(path) for path in places if path and Path(path).exists()]
    # A module without a file is built into the interpreter.
    return not paths or any(
        {"site-packages", "dist-packages"} & {*path.parts} or any(path.is_relative_to(folder) for folder in _LIBRARIES)
        for path in paths
    )


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Yield the names that Python source imports; a name from `from x import y` may not be a module."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = resolve_name("." * node.level + (node.module or ""), package or None)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
