"""Table of kinds, in the order of a training step. To add a kind, add a row.

`retrain` and `retrain.registry` export every row as a decorator; `retrain plugins` and
`retrain schema` list its components. `retrain.registry.built_in` lists the package's components.
"""

# Underscores keep these names out of `from retrain.registry.kinds import *`, which exports the rows of the table.
from typing import Any as _Any

import retrain.protocols as _protocols
import retrain.registry.traits as _traits
from retrain.registry.component import Kind as _Kind

_RUN_PARTS = (
    *("policy", "model", "model_path", "tokenizer", "chat", "device", "trainer_dtype", "run_dir"),
    *("seed", "total_steps", "max_tokens", "group_size", "temperature", "search_paths", "continue_from"),
)
"""Names of the parts of a run with which classes can be built."""
_STATEFUL: dict[str, _Any] = {"protocol": _protocols.StatefulComponent, "parts": _RUN_PARTS}
_CREDIT: dict[str, _Any] = {**_STATEFUL, "must_read": True}

# No model among the parts: `retrain validate` builds tasks as well.
task = _Kind(
    "task", _traits.TaskTraits, "Source of problems.", ("task", "name"), "params", _protocols.Task, parts=("seed",)
)
curriculum = _Kind(
    "curriculum",
    _traits.Traits,
    "Order of the problems: a task that wraps `task` and adapts it after every step.",
    ("training", "curriculum"),
    protocol=_protocols.Task,
    parts=("seed", "task"),
)
source = _Kind(
    "source",
    _traits.SourceTraits,
    "Rows that a step trains on: its rollouts, and rows added to them or replacing them, such as demonstrations.",
    ("source", "name"),
    "params",
    _protocols.RowSource,
    parts=(*_RUN_PARTS, "label", "row_count", "prompt_count", "observe"),
)
reward = _Kind(
    "reward",
    _traits.RewardTraits,
    "Score of one completion: `fn(completion, answer, ...)` -> float, or None for no opinion.",
    ("rewards", "name"),
    "params",
    taken=("mean", "std", "accuracy", "failed"),
    is_async=True,
)
environment = _Kind(
    "environment",
    _traits.EnvironmentTraits,
    "Multi-turn environment: a generator, `action = yield text`, that returns the reward of the episode.",
    ("environment", "name"),
    "params",
    is_generator=True,
)
engine = _Kind(
    "engine",
    _traits.EngineTraits,
    "Source of completions.",
    ("rollout", "engine"),
    "",
    _protocols.Sampler,
    parts=_RUN_PARTS,
)
filter = _Kind(
    "filter",
    _traits.Traits,
    "Rows to train on: columns -> [N] bool, the same for a whole group.",
    ("algorithm", "filter"),
    writes="keep",
    **_CREDIT,
)
uncertainty = _Kind(
    "uncertainty",
    _traits.Traits,
    "Uncertainty of each sampled token: columns -> [N, T].",
    ("algorithm", "uncertainty_kind"),
    writes="uncertainty",
    **_CREDIT,
)
advantage = _Kind(
    "advantage",
    _traits.AdvantageTraits,
    "Episode advantage: columns -> [N].",
    ("algorithm", "advantage_mode"),
    "advantage_params",
    plain="lists",
    writes="episode",
    **_CREDIT,
)
transform = _Kind(
    "transform",
    _traits.TransformTraits,
    "Token transform: columns -> [N, T] advantages, or the column named by `writes=`.",
    ("algorithm", "transform_mode"),
    "transform_params",
    plain="context",
    **_CREDIT,
)
algorithm = _Kind(
    "algorithm",
    _traits.Traits,
    "Token advantages in one step, instead of an advantage: columns -> [N, T] advantages, which transforms may change.",
    ("algorithm", "algorithm_mode"),
    "params",
    plain="context",
    writes="advantages",
    **_CREDIT,
)
loss = _Kind(
    "loss",
    _traits.LossTraits,
    "Loss term per token: columns -> [N, T]. `weight=` is the default of its `weight` key; 0 drops the term.",
    ("loss", "name"),
    "params",
    taken=("total",),
    must_read=True,
)
reduction = _Kind(
    "reduction",
    _traits.Traits,
    "Weight of every token in the loss, from the whole batch's mask: columns -> [N, T].",
    ("algorithm", "reduction"),
    must_read=True,
)
signal = _Kind(
    "signal",
    _traits.SignalTraits,
    "A column computed on first need and called by its name: columns -> the column.",
    **_STATEFUL,
)
tracker = _Kind(
    "tracker",
    _traits.Traits,
    "Destination of metrics.",
    ("logging", "trackers"),
    "",
    _protocols.Tracker,
    parts=_RUN_PARTS,
)
executor = _Kind(
    "executor",
    _traits.ExecutorTraits,
    "How a campaign's runs are executed: a class with `run(jobs, observe)`.",
    ("campaign", "executor"),
    protocol=_protocols.Executor,
    parts=("campaign",),
)
