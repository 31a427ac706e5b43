"""Sections that say who poses problems, who answers the model, and who scores it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from retrain.config.sections.section import Count, Fraction, Natural, Params, Positive, Section


class TaskSettings(Section):
    """`[task]`: where problems come from."""

    name: Annotated[str, Field(min_length=1)] = "addition"
    """A registered task or the dotted path of one."""
    params: Params = {}
    """Parameters of the task; those of a registered task may stand in its own table as well."""


class Environment(Section):
    """`[environment]`: who answers the model, so that a completion is an episode of several turns."""

    name: Annotated[str, Field(min_length=1)] | None = None
    """A registered environment or the dotted path of one; unset: every completion is one turn."""
    max_turns: Count = 8
    """Turns that the model has; an episode that needs more ends there."""
    turn_tokens: Count = 64
    """Tokens of one turn, end-of-sequence included; [training] max_tokens is the budget of all turns of an episode."""
    observation_tokens: Count = 512
    """Tokens of what the environment says at once; longer text is cut in the middle, with a note."""
    workers: Natural = 1
    """Processes, each with a share of the live episodes that waits for no other; 0: the trainer itself holds them."""
    threads: Count = 1
    """Episodes that each worker answers at the same time; above 1 no episode waits for the tools of others."""
    timeout_s: Positive = 10.0
    """An episode whose environment takes longer for a step has failed."""
    python: str | None = None
    """Python interpreter that runs the environment, with the environment's own dependencies; unset: this one."""
    params: Params = {}
    """Parameters of the environment; those of a registered environment may stand in its own table as well."""


class Mixed(Section):
    """One `[[environments]]` entry: an environment and its task, in place of `[environment] name` and `[task]`."""

    name: Annotated[str, Field(min_length=1)]
    """A registered environment or the dotted path of one."""
    task: Annotated[str, Field(min_length=1)]
    """A registered task or the dotted path of one."""
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]+$")] | None = None
    """What metrics and evaluations call it; unset: its name."""
    weight: Positive = 1.0
    """How often its problems are drawn for training, relative to the other entries."""
    params: Params = {}
    """Parameters of the environment; those in its own table hold for every entry."""
    task_params: Params = {}
    """Parameters of the task; those in its own table hold for every entry."""


class MixedTask(Section):
    """One `[[tasks]]` entry: a task whose problems are mixed with those of the others, in place of `[task]`."""

    name: Annotated[str, Field(min_length=1)]
    """A registered task or the dotted path of one."""
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]+$")] | None = None
    """What metrics and evaluations call it; unset: its name."""
    weight: Positive = 1.0
    """How often its problems are drawn for training, relative to the other entries."""
    params: Params = {}
    """Parameters of the task; those in its own table hold for every entry."""


class Reward(Section):
    """One `[[rewards]]` entry; the reward of a completion is the weighted sum."""

    name: Annotated[str, Field(min_length=1)]
    """A registered reward or the dotted path of a function."""
    weight: float = 1.0
    """Factor of this part in the sum; 0 records the part without training on it."""
    timeout_s: Positive | None = None
    """Seconds for one of its calls, for a whole batch if it scores one; unset: those of [reward_pool]."""
    concurrency: Count = 16
    """Completions that an async reward scores at once."""
    network: bool = False
    """It runs outside the sandbox, which has no network; the other rewards stay inside."""
    params: Params = {}
    """Parameters of the reward."""


class RewardPoolSettings(Section):
    """`[reward_pool]`: the processes that run rewards, apart from the trainer."""

    workers: Natural = 1
    """Processes; 0 runs rewards in the trainer itself, where a hang or a crash is the run's."""
    timeout_s: Positive = 10.0
    """A completion that takes longer to score is failed: masked and counted, never scored 0."""
    memory_mb: Natural = 2048
    """Memory that a worker may allocate; 0 for no limit."""
    max_failed: Fraction = 0.5
    """The run stops when a larger share of a step's completions could not be scored."""
    sandbox: Literal["auto", "require", "off"] = "auto"
    """No network, no home directory, no writing but to private temporary directories; "auto": where this can be had."""
    env: list[str] = []
    """Names of environment variables that rewards see besides PATH, LANG, PYTHON* and their like."""
    readable: list[str] = []
    """Files and directories that rewards may read though the sandbox hides them, such as ~/.cache/huggingface."""
