"""Libraries that come with an extra of this package."""

from __future__ import annotations

import importlib
from typing import Any

from retrain.errors import MissingExtraError


def library(module: str, extra: str) -> Any:
    """Import a module of an optional dependency; MissingExtraError names the extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(module.split(".")[0].replace("_", "-"), extra) from error
