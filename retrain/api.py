"""Names for programs that open and study runs, as `retrain.lab` does. Components need only `retrain` itself.

Names are imported on first use, so that a program that only reads a configuration does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retrain.campaign.plan.load_campaign import load_campaign as load_campaign
    from retrain.config.load import load as load
    from retrain.from_python import CampaignResult as CampaignResult
    from retrain.from_python import Run as Run
    from retrain.from_python import run_campaign as run_campaign
    from retrain.from_python import train as train
    from retrain.run.collectors.rollouts import sampled as sampled
    from retrain.run.collectors.rollouts import score as score
    from retrain.run.collectors.rollouts import train_sampling as train_sampling
    from retrain.run.collectors.rollouts import valid_rows as valid_rows
    from retrain.run.episodes import FAILED as FAILED
    from retrain.run.episodes import EpisodeRunner as EpisodeRunner
    from retrain.run.episodes import turn_stream as turn_stream
    from retrain.run.evaluate import measure as measure
    from retrain.run.loop import seed_generators as seed_generators
    from retrain.run.reopen import each_checkpoint as each_checkpoint
    from retrain.run.reopen import reopen as reopen
    from retrain.run.run_context import RunContext as RunContext

_MODULES = {
    "load": "retrain.config.load",
    "load_campaign": "retrain.campaign.plan.load_campaign",
    **dict.fromkeys(("CampaignResult", "Run", "run_campaign", "train"), "retrain.from_python"),
    **dict.fromkeys(("sampled", "score", "train_sampling", "valid_rows"), "retrain.run.collectors.rollouts"),
    **dict.fromkeys(("EpisodeRunner", "FAILED", "turn_stream"), "retrain.run.episodes"),
    "measure": "retrain.run.evaluate",
    "seed_generators": "retrain.run.loop",
    **dict.fromkeys(("each_checkpoint", "reopen"), "retrain.run.reopen"),
    "RunContext": "retrain.run.run_context",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
