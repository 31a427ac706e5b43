"""The configuration of a run for pages and model cards: resolved, without comments and secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

from retrain.config.schema import Config
from retrain.system.masking import masked

_NOT_SETTINGS = ("components", "logging")
"""Sections of config.resolved.json that are derived, or name files of this machine."""


def settings(resolved: Mapping[str, Any]) -> str:
    """Return the resolved values that differ from the defaults, as TOML that reproduces the run.

    Values of keys that look secret are masked. Comments and command-line overrides are left out, because they may
    contain secrets as well.
    """
    defaults = Config().model_dump(mode="json")
    chosen = {
        name: _without_defaults(section, defaults.get(name))
        for name, section in resolved.items()
        if name not in _NOT_SETTINGS
    }
    return tomli_w.dumps({name: section for name, section in masked(chosen).items() if section}).strip()


def _without_defaults(section: Any, defaults: Any) -> Any:
    """Remove defaults from a section, and None, which TOML lacks and which is the default wherever it is valid."""
    if isinstance(section, Mapping):
        plain = defaults if isinstance(defaults, Mapping) else {}
        return {
            key: _without_defaults(value, None)
            for key, value in section.items()
            # Tables of components have no defaults here; all of their values are shown.
            if value is not None and (key not in plain or plain[key] != value)
        }
    if isinstance(section, list):
        return [] if section == defaults else [_without_defaults(item, None) for item in section if item is not None]
    return section
