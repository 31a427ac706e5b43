"""Fingerprints of the user's code: what a resumed run compares with the run that it continues."""

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

from retrain.registry.component import Component

_LIBRARIES = tuple(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_OWN = __name__.partition(".")[0]


def source_hashes(components: Iterable[Component]) -> dict[str, str]:
    """Hash of every module of the user's that defines one of `components`, and of what it imports in turn.

    Not followed: imports from installed packages (but within a plug-in's own package) and from this one, and names
    that are computed.
    """
    waiting = list(dict.fromkeys(str(getattr(component.target, "__module__", "")) for component in components))
    found: dict[str, str] = {}
    while waiting:
        name = waiting.pop()
        spec = _spec(name)
        if name in found or name.partition(".")[0] == _OWN or spec is None or not spec.origin:
            continue
        file = Path(spec.origin)
        if not file.is_file():
            continue
        data = file.read_bytes()
        found[name] = hashlib.sha256(data).hexdigest()[:16]
        package = name if spec.submodule_search_locations is not None else name.rpartition(".")[0]
        waiting += [other for other in _imports(data, package) if other not in found and _is_users(other, name)]
    return dict(sorted(found.items()))


def _spec(name: str) -> ModuleSpec | None:
    """Where a module is, None if it is nowhere; the packages that it is in are imported."""
    module = sys.modules.get(name)
    if module is not None:
        return module.__spec__
    with suppress(Exception):  # importing a package may raise anything
        return find_spec(name)
    return None


def _is_users(name: str, importer: str) -> bool:
    """Whether a module that `importer` names is code of the same package, or of no installed one."""
    top = name.partition(".")[0]
    if top != importer.partition(".")[0] and _is_installed(_spec(top)):
        return False
    spec = _spec(name)
    return spec is not None and spec.origin is not None and Path(spec.origin).is_file()


def _is_installed(spec: ModuleSpec | None) -> bool:
    """Whether a top-level module is no user's: of Python itself, of this environment or of one that it extends."""
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    paths = [Path(place) for place in places if place and Path(place).exists()]
    return not paths or any(
        {"site-packages", "dist-packages"} & {*path.parts} or any(path.is_relative_to(folder) for folder in _LIBRARIES)
        for path in paths
    )


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Modules, and what may be modules, that Python source imports."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = resolve_name("." * node.level + (node.module or ""), package or None)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
