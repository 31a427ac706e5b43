"""Composable reinforcement learning for language models, from one TOML file.

The public surface, loaded on first use so that `import retrain` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.algorithms.graph.compose import compute_composable_advantages as compute_composable_advantages
    from retrain.algorithms.graph.plain_functions import AlgorithmContext as AlgorithmContext
    from retrain.algorithms.graph.plain_functions import AlgorithmOutput as AlgorithmOutput
    from retrain.algorithms.graph.plain_functions import TransformContext as TransformContext
    from retrain.algorithms.graph.plain_functions import TransformOutput as TransformOutput
    from retrain.environments.contract import Reply as Reply
    from retrain.environments.contract import Say as Say
    from retrain.registry.component import Finding as Finding
    from retrain.registry.kinds import *  # noqa: F403 - every kind is a decorator
    from retrain.types import Batch as Batch
    from retrain.types import Problem as Problem
    from retrain.types import Rollout as Rollout

__version__ = "0.2.0"

_ELSEWHERE = {
    "compute_composable_advantages": "retrain.algorithms.graph.compose",
    "Finding": "retrain.registry",
    **dict.fromkeys(("Reply", "Say"), "retrain.environments.contract"),
    **dict.fromkeys(("Batch", "Problem", "Rollout"), "retrain.types"),
    **dict.fromkeys(
        ("AlgorithmContext", "AlgorithmOutput", "TransformContext", "TransformOutput"),
        "retrain.algorithms.graph.plain_functions",
    ),
}
"""Where public names live that are not kinds of components; a kind is a decorator of retrain.registry."""


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    if not name.startswith("_") and name in (kinds := importlib.import_module("retrain.registry")).KINDS:
        return kinds.KINDS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
