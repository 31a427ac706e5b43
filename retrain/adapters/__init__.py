"""Use the advantages and rewards of `retrain` in other trainers: verl, slime and TRL.

Each submodule uses the extension points of one trainer, without patching it, and imports it only when needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.adapters.core import compute_advantage as compute_advantage
    from retrain.adapters.slime import compute_advantage_for_slime as compute_advantage_for_slime
    from retrain.adapters.slime import reward_for_slime as reward_for_slime
    from retrain.adapters.trl_hicra import HICRAConfig as HICRAConfig
    from retrain.adapters.trl_hicra import HICRATrainer as HICRATrainer
    from retrain.adapters.verl import compute_advantage_for_verl as compute_advantage_for_verl
    from retrain.adapters.verl import reward_for_verl as reward_for_verl

_MODULES = {
    "HICRAConfig": "trl_hicra",
    "HICRATrainer": "trl_hicra",
    "compute_advantage": "core",
    "compute_advantage_for_slime": "slime",
    "compute_advantage_for_verl": "verl",
    "reward_for_slime": "slime",
    "reward_for_verl": "verl",
}

# The names that need TRL are left out, so that a star import works without it.
__all__ = [
    "compute_advantage",
    "compute_advantage_for_slime",
    "compute_advantage_for_verl",
    "reward_for_slime",
    "reward_for_verl",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f"retrain.adapters.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
