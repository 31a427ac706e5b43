"""What `[environment]` demands, and how its workers are started."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from retrain.config.document import Document
from retrain.config.resolve import LoadedConfig, Resolved, is_elsewhere, labels, mixed_labels
from retrain.config.schema import Config, Environment, TaskSettings
from retrain.errors import ConfigError, UserCodeError
from retrain.registry import Bound
from retrain.registry.call import Call

if TYPE_CHECKING:
    from retrain.environments.world_pool import Launch


def check_environment(config: Config, document: Document, resolved: Resolved) -> None:
    """Record what keeps the environment from answering; ComponentError if it does not fit its slot."""
    environment = config.environment
    _check_mix(config, document)
    if not labels(config):
        _refuse_unread(environment, document)
        return
    from retrain.environments.contract import fields_read
    from retrain.environments.world_pool import WorldPool

    if config.rollout.overlap and environment.workers == 0:
        problem = "the environment would run beside the trainer and share its generators"
        document.refuse(("environment", "workers"), problem, "use at least 1, or [rollout] overlap = 0")
    for bound in resolved.all("environment"):
        with Call(bound.component.kind, bound.name)():
            target = target_of(bound)
        fields_read(bound.name, target)
    if environment.python is None:
        return
    if shutil.which(environment.python) is None:
        document.refuse(("environment", "python"), f'there is no program "{environment.python}"', "give its path")
    elif not document.problems:
        try:
            WorldPool(launch(config, resolved)).close()
        except UserCodeError as error:
            problem, _, trace = str(error).partition("\n")
            fix = "is it a Python of 3.11 or later that can import the environment?"
            refused = ConfigError([document.at(("environment", "python"), problem, fix)])
            refused.add_note(trace)
            raise refused from error


def _check_mix(config: Config, document: Document) -> None:
    mix = "environments" if config.environments else "tasks"
    if not (names := mixed_labels(config)):
        return
    if config.task != TaskSettings():
        document.refuse(("task",), f"every entry of [[{mix}]] names its own", "remove it, or the entries")
    if config.environment.name is not None:
        problem = (
            "every entry of [[environments]] names its own" if config.environments else "[[tasks]] have no environment"
        )
        document.refuse(("environment", "name"), problem, "name environments and tasks in [[environments]]")
    if config.environments and config.tasks:
        document.refuse(("tasks",), "every entry of [[environments]] names its own task", "remove these, or those")
    for index, label in enumerate(names):
        if label in names[:index]:
            problem = f'two entries have the label "{label}", so that metrics cannot tell them apart'
            document.refuse((mix, index, "name"), problem, "give one of them a label")


def _refuse_unread(environment: Environment, document: Document) -> None:
    # A resolved configuration, which a run is opened again from, has every key with its default.
    for key in environment.model_fields_set - {"name"}:
        if getattr(environment, key) != type(environment).model_fields[key].default:
            document.refuse(("environment", key), "there is no environment: nothing reads it", "set name, or remove it")


def check_endpoint(loaded: LoadedConfig, ranks: bool) -> None:
    """ConfigError if this run cannot train on what programs say to its policy.

    Args:
        ranks: this process is one of several.
    """
    from retrain.algorithms.graph.pipeline import Pipeline

    document = Document(loaded.file, loaded.text, places=dict(loaded.places))
    pipeline = Pipeline.resolve(loaded.components.stages(loaded.objective.signals), loaded.components.signal)
    for name in (stage.name for stage in pipeline.graph if "problems" in stage.reads):
        problem = f'"{name}" continues completions from their middle, where a program cannot be put back'
        document.refuse(("algorithm", "algorithm_mode"), problem, "use other credit, such as grpo")
    if loaded.config.rollout.overlap:
        document.refuse(("rollout", "overlap"), "programs are answered between updates, not meanwhile", "use 0")
    if ranks:
        document.refuse(("distributed",), "programs talk to a policy of one process, not of several ranks", "start one")
    if document.problems:
        raise ConfigError(document.problems)


def launch(config: Config, resolved: Resolved) -> Launch:
    """How the workers of the environments are started."""
    from retrain.environments.contract import Limits
    from retrain.environments.world_pool import Launch
    from retrain.environments.world_worker import Hello
    from retrain.system.sandbox import missing
    from retrain.system.worker_process import Containment

    environment, pool, paths = config.environment, config.reward_pool, config.plugins.search_paths
    limits = Limits(
        environment.max_turns, environment.turn_tokens, environment.observation_tokens, config.training.max_tokens
    )
    bound, hellos = iter(resolved.all("environment")), dict[str, Hello]()
    for label, entry in zip(labels(config), config.environments or (environment,), strict=True):
        name = str(entry.name)
        one = None if is_elsewhere(config, name) else next(bound)
        target, params = (name, entry.params) if one is None else (one.path, one.arguments)
        known = {} if one is None else one.component.traits
        traits = {key: bool(known[key]) for key in ("replay", "rewards") if key in known}
        hellos[label] = Hello(name, target, params, paths, environment.timeout_s, limits, traits)
    sandboxed = environment.workers > 0 and pool.sandbox != "off" and not missing()
    return Launch(
        hellos,
        Containment(pool.memory_mb, sandboxed, (*pool.readable, *paths), runs_code=True),
        pool.env,
        environment.python,
        environment.workers > 0,
        environment.threads,
    )


def target_of(bound: Bound) -> Any:
    """What is called for a new episode, less `self`."""
    target: Any = bound.component.target
    return target(**bound.arguments) if bound.component.stateful else target
