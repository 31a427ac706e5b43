"""Tensor mathematics with no dependency but torch. Submodules are imported at their first use."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

_MODULES = frozenset(module.name for module in pkgutil.iter_modules(__path__))


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
