"""Sharding of a model over ranks. FSDP2 is imported where there are several ranks, and nowhere else."""

from __future__ import annotations

from typing import Any

from retrain.functional.weights import ParameterReader
from retrain.protocols import WHOLE, Ranks, Shards
from retrain.training.distributed.sharded_tensors import device_of
from retrain.training.model.loading import fill, parameter_names
from retrain.training.settings import PolicySettings


def shard(model: Any, settings: PolicySettings, ranks: Ranks, source: ParameterReader | None = None) -> Shards:
    """Shard a model over the ranks if `settings.shard` is "full"; call this before creating the optimizer.

    Args:
        model: a transformers causal LM.
        settings: settings of its training.
        ranks: the processes that train it together.
        source: reads the values of parameters on the meta device.
    """
    if ranks.mesh is not None and settings.shard == "full":
        from retrain.training.distributed.shards import Sharded

        return Sharded(model, settings, ranks, source)
    if source is not None:
        called = parameter_names(model)
        fill(model, lambda p: source(called[id(p)]))
        model.to(device_of(ranks))
    if ranks.size == 1:
        return WHOLE
    from retrain.training.distributed.shards import Replicated

    return Replicated(ranks)
