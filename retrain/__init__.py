"""Composable reinforcement learning for language models, from one TOML file.

Public names are imported on first use, so that `import retrain` stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from retrain.version import __version__ as __version__

if TYPE_CHECKING:
    from retrain.algorithms.graph.compose import compute_composable_advantages as compute_composable_advantages
    from retrain.algorithms.graph.plain_functions import AlgorithmContext as AlgorithmContext
    from retrain.algorithms.graph.plain_functions import AlgorithmOutput as AlgorithmOutput
    from retrain.algorithms.graph.plain_functions import TransformContext as TransformContext
    from retrain.algorithms.graph.plain_functions import TransformOutput as TransformOutput
    from retrain.api import CampaignResult as CampaignResult
    from retrain.api import Run as Run
    from retrain.api import run_campaign as run_campaign
    from retrain.api import train as train
    from retrain.engines.torch_engine import TorchEngine as TorchEngine
    from retrain.environments.contract import Action as Action
    from retrain.environments.contract import Observation as Observation
    from retrain.registry import find as find
    from retrain.registry.kinds import *  # noqa: F403 - every kind is a decorator
    from retrain.registry.traits import Finding as Finding
    from retrain.training.model.builtin_model import build_model as build_model
    from retrain.training.model.builtin_model import build_tokenizer as build_tokenizer
    from retrain.types import Batch as Batch
    from retrain.types import ExpertRow as ExpertRow
    from retrain.types import Problem as Problem
    from retrain.types import Request as Request
    from retrain.types import Rollout as Rollout
    from retrain.types import Sampling as Sampling

_MODULES = {
    "compute_composable_advantages": "retrain.algorithms.graph.compose",
    **dict.fromkeys(("Finding", "find"), "retrain.registry"),
    "TorchEngine": "retrain.engines.torch_engine",
    **dict.fromkeys(("build_model", "build_tokenizer"), "retrain.training.model.builtin_model"),
    **dict.fromkeys(("Action", "Observation"), "retrain.environments.contract"),
    **dict.fromkeys(("CampaignResult", "Run", "run_campaign", "train"), "retrain.api"),
    **dict.fromkeys(("Batch", "ExpertRow", "Problem", "Request", "Rollout", "Sampling"), "retrain.types"),
    **dict.fromkeys(
        ("AlgorithmContext", "AlgorithmOutput", "TransformContext", "TransformOutput"),
        "retrain.algorithms.graph.plain_functions",
    ),
}
"""Modules of the public names that are not kinds; a kind is a decorator of retrain.registry."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    # Python and its tools ask for names such as __path__, which must not import the registry.
    if not name.startswith("_") and name in (kinds := importlib.import_module("retrain.registry")).KINDS:
        return kinds.KINDS[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
