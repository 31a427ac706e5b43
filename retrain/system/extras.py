"""Import optional dependencies."""

from __future__ import annotations

import importlib
from typing import Any

from retrain.errors import MissingExtraError


def library(module: str, extra: str) -> Any:
    """Import and return a module of an optional dependency.

    Args:
        module: dotted name of the module.
        extra: extra of this package that installs it.
    Raises:
        MissingExtraError: the module is not installed; the error names the extra.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(module.split(".")[0].replace("_", "-"), extra) from error
