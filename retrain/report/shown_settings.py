"""The configuration of a run as a page or a model card may show it: resolved, without comments and without secrets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tomli_w

from retrain.config.schema import Config
from retrain.system.masking import masked

_SHOWN_SEPARATELY = ("components", "logging")
"""Sections of config.resolved.json that are derived, or about places of files."""


def settings(resolved: Mapping[str, Any]) -> str:
    """The resolved values that differ from the defaults, as TOML that gives the same run again.

    Values under keys that look secret are masked. Nothing else of the file that the user wrote is kept: a comment or
    an override of the command line may hold anything.
    """
    defaults = Config().model_dump(mode="json")
    chosen = {
        name: _chosen(section, defaults.get(name))
        for name, section in resolved.items()
        if name not in _SHOWN_SEPARATELY
    }
    return tomli_w.dumps({name: section for name, section in masked(chosen).items() if section}).strip()


def _chosen(section: Any, defaults: Any) -> Any:
    """Keys that a section sets. None is left out: TOML lacks it, and it is the default where allowed."""
    if isinstance(section, Mapping):
        plain = defaults if isinstance(defaults, Mapping) else {}
        return {
            key: _chosen(value, None)
            for key, value in section.items()
            if value is not None and (key not in plain or plain[key] != value)
        }
    if isinstance(section, list):
        return [] if section == defaults else [_chosen(item, None) for item in section if item is not None]
    return section
