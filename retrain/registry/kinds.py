"""The table of kinds, in the order of a step. A row is all that a new kind takes.

`retrain` and `retrain.registry` export every row as a decorator, `retrain plugins` and `retrain schema` list its
components, and any module of the package that declares one is found by its source: `@kind("name", table="table", ...)`
at the start of a line, the table where it is not the name.
"""

from functools import partial as _partial

import retrain.protocols as _protocols
import retrain.registry.verbs as _verbs
from retrain.registry.component import Kind as _Kind

_RUN = (
    *("policy", "model", "model_path", "tokenizer", "device", "run_dir"),
    *("seed", "total_steps", "max_tokens", "group_size", "temperature", "search_paths", "continue_from"),
)
"""Parts of a run that its components may be built with, by name."""
_part = _partial(_Kind, protocol=_protocols.StatefulComponent, parts=_RUN, verbs=_verbs.PART)
_credit = _partial(_part, must_read=True)

task = _Kind(
    "task", "Source of problems.", ("task", "name"), "params", _protocols.Task, parts=("seed",), verbs=_verbs.TASK
)
curriculum = _Kind(
    "curriculum",
    "Which problems of the run's task come next: a task that is built with `task` and learns from every step.",
    ("training", "curriculum"),
    protocol=_protocols.Task,
    parts=("seed", "task"),
    verbs=_verbs.TASK,
)
reward = _Kind(
    "reward",
    "Score of one completion: `fn(completion, answer, ...)` -> float, or None for no opinion.",
    ("rewards", "name"),
    "params",
    taken=("mean", "std", "accuracy", "failed"),
    later=True,
)
environment = _Kind(
    "environment",
    "Who answers the model: a generator, `reply = yield text`, that returns the episode's reward.",
    ("environment", "name"),
    "params",
    talks=True,
)
engine = _Kind(
    "engine", "Source of completions.", ("rollout", "engine"), "", _protocols.Sampler, parts=_RUN, verbs=_verbs.ENGINE
)
filter = _credit(
    "filter",
    "Which rows are worth training on: columns -> [N] bool, the same for a whole group.",
    ("algorithm", "filter"),
)
uncertainty = _credit(
    "uncertainty", "Uncertainty of each sampled token: columns -> [N, T].", ("algorithm", "uncertainty_kind")
)
advantage = _credit(
    "advantage",
    "Episode advantage: columns -> [N].",
    ("algorithm", "advantage_mode"),
    "advantage_params",
    plain="lists",
)
transform = _credit(
    "transform",
    "Token transform: columns -> [N, T] advantages, or the column named by `writes=`.",
    ("algorithm", "transform_mode"),
    "transform_params",
    plain="context",
)
algorithm = _credit(
    "algorithm",
    "Whole algorithm, instead of advantage and transforms: columns -> [N, T] advantages.",
    ("algorithm", "algorithm_mode"),
    "params",
    plain="context",
)
loss = _Kind(
    "loss",
    "Loss term per token: columns -> [N, T]. `weight=` is the default of its `weight` key; 0 drops the term.",
    ("loss", "name"),
    "params",
    taken=("total",),
    must_read=True,
    traits={"weight": 1.0},
)
reduction = _Kind(
    "reduction",
    "Weight of every token in the loss, from the whole batch's mask: columns -> [N, T].",
    ("algorithm", "reduction"),
    must_read=True,
)
signal = _part("signal", "A column computed on first need and called by its name: columns -> the column.")
tracker = _Kind("tracker", "Sink of metrics.", ("logging", "trackers"), "", _protocols.Tracker, parts=_RUN)
executor = _Kind(
    "executor",
    "How a campaign's runs are executed: a class with `run(jobs, observe)`.",
    ("campaign", "executor"),
    protocol=_protocols.Executor,
    parts=("campaign",),
    verbs=_verbs.EXECUTOR,
)
