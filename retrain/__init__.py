"""Composable reinforcement learning for language models, from one TOML file.

The public surface, loaded on first use so that `import retrain` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.algorithms.graph.compose import (
        compute_composable_advantages as compute_composable_advantages,
    )
    from retrain.registry import advantage as advantage
    from retrain.registry import algorithm as algorithm
    from retrain.registry import engine as engine
    from retrain.registry import filter as filter
    from retrain.registry import loss as loss
    from retrain.registry import reduction as reduction
    from retrain.registry import reward as reward
    from retrain.registry import signal as signal
    from retrain.registry import task as task
    from retrain.registry import tracker as tracker
    from retrain.registry import transform as transform
    from retrain.registry import uncertainty as uncertainty
    from retrain.types import AlgorithmContext as AlgorithmContext
    from retrain.types import AlgorithmOutput as AlgorithmOutput
    from retrain.types import Batch as Batch
    from retrain.types import Problem as Problem
    from retrain.types import Rollout as Rollout
    from retrain.types import TransformContext as TransformContext
    from retrain.types import TransformOutput as TransformOutput

__version__ = "0.2.0"

_ELSEWHERE = {
    "compute_composable_advantages": "retrain.algorithms.graph.compose",
    **dict.fromkeys(("AlgorithmContext", "AlgorithmOutput", "Batch", "Problem", "Rollout"), "retrain.types"),
    **dict.fromkeys(("TransformContext", "TransformOutput"), "retrain.types"),
}
"""Where public names live that are not decorators; those are in retrain.registry."""

__all__ = [
    "AlgorithmContext",
    "AlgorithmOutput",
    "Batch",
    "Problem",
    "Rollout",
    "TransformContext",
    "TransformOutput",
    "__version__",
    "advantage",
    "algorithm",
    "compute_composable_advantages",
    "engine",
    "filter",
    "loss",
    "reduction",
    "reward",
    "signal",
    "task",
    "tracker",
    "transform",
    "uncertainty",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(_ELSEWHERE.get(name, "retrain.registry")), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
