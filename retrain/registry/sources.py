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
    """Where a module is, without running it; None if it is nowhere."""
    module = sys.modules.get(name)
    if module is not None:
        return module.__spec__
    with suppress(ImportError, ValueError, AttributeError):
        return find_spec(name)
    return None


def _is_users(name: str, importer: str) -> bool:
    """Whether a module that `importer` names is code of the same package, or of no installed one."""
    spec = _spec(name)
    if spec is None or not spec.origin or not Path(spec.origin).is_file():
        return False
    if name.partition(".")[0] == importer.partition(".")[0]:
        return True
    return not any(Path(spec.origin).is_relative_to(folder) for folder in _LIBRARIES)


def _imports(source: bytes, package: str) -> Iterator[str]:
    """Modules, and what may be modules, that Python source imports."""
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = resolve_name("." * node.level + (node.module or ""), package or None)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
