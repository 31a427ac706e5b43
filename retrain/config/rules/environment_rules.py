"""Rules of `[environment]` and of mixtures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

from retrain.config.loaded_config import LoadedConfig
from retrain.config.schema import Config, TaskSettings
from retrain.config.slots import labels, mixed_labels
from retrain.errors import ComponentError
from retrain.registry import Finding
from retrain.registry.call import Call


def mixture(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require distinct labels in `[[environments]]` or `[[tasks]]`, and no other task or environment beside them."""
    mix, names = "environments" if config.environments else "tasks", mixed_labels(config)
    if names and config.task != TaskSettings():
        yield Finding(("task",), f"every entry of [[{mix}]] names its own", "remove it, or the entries")
    if names and config.environment.name is not None:
        problem = f"every entry of [[{mix}]] names its own" if config.environments else "[[tasks]] have no environment"
        yield Finding(("environment", "name"), problem, "list environments with their tasks in [[environments]]")
    if config.environments and config.tasks:
        problem = "every entry of [[environments]] names its own task"
        yield Finding(("tasks",), problem, "remove [[tasks]] or [[environments]]")
    for index, label in enumerate(names):
        if label in names[:index]:
            problem = f'two entries have the label "{label}", so their metrics would have the same names'
            yield Finding((mix, index, "name"), problem, "set a distinct label for one of them")


def unread_settings(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Refuse settings of `[environment]` in a run without an environment."""
    environment = config.environment
    # The resolved configuration of an earlier run has every key; those with their defaults are accepted.
    for key in () if labels(config) else environment.model_fields_set - {"name"}:
        if getattr(environment, key) != type(environment).model_fields[key].default:
            yield Finding(
                ("environment", key), "has no effect: there is no environment", "set [environment] name, or remove it"
            )


def fields(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require that environments read only fields that problems have."""
    # An environment for another interpreter is not among them: only its workers can import it.
    environments = loaded.all("environment")
    if not environments:
        return
    # Imported here, because most runs have no environment.
    from retrain.environments.contract import fields_read

    for environment in environments:
        try:
            with Call(environment.kind, environment.name)():
                target: Any = environment.target
                target = target(**environment.arguments) if environment.stateful else target
            fields_read(environment.name, target)
        except ComponentError as error:
            yield Finding(("environment", "name"), error.problem, error.fix)


def workers(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require worker processes for environments in a run with `[rollout] overlap`."""
    if labels(config) and config.rollout.ahead and config.environment.workers == 0:
        problem = "the environment would run in the trainer's process and share its random generators"
        yield Finding(("environment", "workers"), problem, "set it to at least 1, or [rollout] overlap = 0")


def interpreter(config: Config, loaded: LoadedConfig) -> Iterator[Finding]:
    """Require that `[environment] python` is a program; `check_interpreter` starts it later."""
    python = config.environment.python if labels(config) else None
    if python is not None and shutil.which(python) is None:
        yield Finding(("environment", "python"), f'there is no program "{python}"', "give its path")
