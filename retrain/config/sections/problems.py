"""Sections of tasks, environments and rewards."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from retrain.config.sections.section import Count, Fraction, Natural, Params, Positive, Section


class TaskSettings(Section):
    """`[task]`: the source of problems."""

    name: Annotated[str, Field(min_length=1)] = "addition"
    """A registered task or the dotted path of one."""
    params: Params = {}
    """Parameters of the task; a registered task also has its own table for them."""


class Environment(Section):
    """`[environment]`: the code that answers the model, which makes a completion an episode of several turns."""

    name: Annotated[str, Field(min_length=1)] | None = None
    """A registered environment or the dotted path of one; unset: every completion is one turn."""
    max_turns: Count = 8
    """Most turns of the model in an episode; the episode ends after the last one."""
    turn_tokens: Count = 64
    """Longest turn in tokens, end-of-sequence included; [training] max_tokens limits the sum over all turns."""
    observation_tokens: Count = 512
    """Longest observation in tokens; of longer text the middle is replaced by a note."""
    workers: Natural = 1
    """Worker processes. Each runs a share of the episodes and waits for no other one; 0: run them in the trainer."""
    threads: Count = 1
    """Episodes that each worker steps at the same time; above 1, slow tools do not delay other episodes."""
    timeout_s: Positive = 10.0
    """Most seconds for one step of the environment; after that the episode has failed."""
    python: str | None = None
    """Python interpreter of the worker processes, for an environment with dependencies of its own; unset: this one."""
    params: Params = {}
    """Parameters of the environment; a registered environment also has its own table for them."""


class Mixed(Section):
    """One `[[environments]]` entry: an environment and its task, instead of `[environment] name` and `[task]`."""

    name: Annotated[str, Field(min_length=1)]
    """A registered environment or the dotted path of one."""
    task: Annotated[str, Field(min_length=1)]
    """A registered task or the dotted path of one."""
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]+$")] | None = None
    """Name in metrics and evaluations; unset: `name`."""
    weight: Positive = 1.0
    """Weight with which its problems are drawn for training, relative to the other entries."""
    params: Params = {}
    """Parameters of the environment; those in its own table apply to every entry."""
    task_params: Params = {}
    """Parameters of the task; those in its own table apply to every entry."""


class MixedTask(Section):
    """One `[[tasks]]` entry: a task whose problems are mixed with those of the other entries, instead of `[task]`."""

    name: Annotated[str, Field(min_length=1)]
    """A registered task or the dotted path of one."""
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]+$")] | None = None
    """Name in metrics and evaluations; unset: `name`."""
    weight: Positive = 1.0
    """Weight with which its problems are drawn for training, relative to the other entries."""
    params: Params = {}
    """Parameters of the task; those in its own table apply to every entry."""


class Reward(Section):
    """One `[[rewards]]` entry. The reward of a completion is the weighted sum of all entries."""

    name: Annotated[str, Field(min_length=1)]
    """A registered reward or the dotted path of a function."""
    weight: float = 1.0
    """Weight of this entry in the sum; 0: record it without training on it."""
    timeout_s: Positive | None = None
    """Most seconds for one call, which scores one completion, or a whole batch if the reward takes batches. Unset:
    `[reward_pool] timeout_s`."""
    concurrency: Count = 16
    """Completions that an async reward scores at the same time."""
    params: Params = {}
    """Parameters of the reward."""


class RewardPoolSettings(Section):
    """`[reward_pool]`: the processes that compute rewards, separate from the trainer."""

    workers: Natural = 1
    """Worker processes; 0: compute rewards in the trainer, where a hang or a crash of a reward is one of the run."""
    timeout_s: Positive = 10.0
    """Most seconds to score a completion. After that it has failed: it is masked and counted, not scored 0."""
    memory_mb: Natural = 2048
    """Most memory that a worker may allocate, in MB; 0: no limit."""
    max_failed: Fraction = 0.5
    """Largest share of a step's completions that may fail to be scored; above it the run stops."""
    env: list[str] = []
    """Names of environment variables to pass to rewards, in addition to PATH, LANG, PYTHON* and similar ones."""
