"""Launch options of environment workers, and checks of their interpreter and of policy endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain import registry
from retrain.config.document import Document
from retrain.config.loaded_config import LoadedConfig
from retrain.config.slots import labels, needs_own_interpreter
from retrain.errors import ComponentError, UserCodeError

if TYPE_CHECKING:
    from retrain.environments.env_pool import Launch


def check_interpreter(loaded: LoadedConfig) -> None:
    """Start the interpreter of `[environment] python` once, to check that it can import the environments.

    This runs code of the user, so it is called only with a valid configuration.

    Raises:
        ConfigError: the interpreter cannot import an environment.
    """
    from retrain.environments.env_pool import EnvPool

    document = Document(loaded.file, loaded.text, places=dict(loaded.places))
    try:
        EnvPool(launch(loaded)).start().close()
    except ComponentError as error:
        document.refuse(("environment", "name"), error.problem, error.fix)
        document.stop()
    except UserCodeError as error:
        # The first line names the problem; the rest is the traceback of the worker.
        problem, _, trace = str(error).partition("\n")
        fix = "use a Python 3.11 or later that can import the environment"
        document.refuse(("environment", "python"), problem, fix)
        document.traces.append(trace)
        document.stop()


def check_endpoint(loaded: LoadedConfig, ranks: bool) -> None:
    """Check that this run can train on the requests of programs to its policy endpoint.

    Args:
        loaded: the configuration.
        ranks: True if this process is one of several ranks.
    Raises:
        ConfigError: the credit, `[rollout] overlap` or several ranks rule it out.
    """

    document = Document(loaded.file, loaded.text, places=dict(loaded.places))
    pipeline = loaded.pipeline_of(loaded.objective(exact=True))
    for name in (stage.name for stage in pipeline.graph if "problems" in stage.reads):
        problem = f'"{name}" continues completions from a prefix, and a program cannot be reset to one'
        document.refuse(("algorithm", "algorithm_mode"), problem, "use other credit, such as grpo")
    if loaded.config.rollout.ahead:
        key, fix = ("mode", 'set it to "steps"') if loaded.config.rollout.continuous else ("overlap", "set it to 0")
        document.refuse(("rollout", key), "a policy endpoint does not sample during an update", fix)
    if ranks:
        document.refuse(("distributed",), "a policy endpoint needs a single process", "start one rank")
    document.stop()


def launch(loaded: LoadedConfig) -> Launch:
    """Return the launch options of the environment workers."""
    from retrain.environments.contract import Limits
    from retrain.environments.env_pool import Launch
    from retrain.environments.env_process import Hello

    config = loaded.config
    environment, pool, paths = config.environment, config.reward_pool, config.plugins.search_paths
    limits = Limits(
        environment.max_turns, environment.turn_tokens, environment.observation_tokens, config.training.max_tokens
    )
    # The environments that can be imported here, in the order of the labels.
    environments, hellos = iter(loaded.all("environment")), dict[str, Hello]()
    for label, entry in zip(labels(config), config.environments or (environment,), strict=True):
        name = str(entry.name)
        environment_here = None if needs_own_interpreter(config, name) else next(environments)
        target = name if environment_here is None else environment_here.path
        params = entry.params if environment_here is None else environment_here.arguments
        declared = None if environment_here is None else registry.environment.traits_of(environment_here)
        # The worker reads the traits of an environment that only it can import.
        traits = {"replay": declared.replay, "rewards": declared.rewards} if declared else {}
        hellos[label] = Hello(name, target, params, paths, environment.timeout_s, limits, traits)
    return Launch(hellos, pool.memory_mb, pool.env, environment.python, environment.workers > 0, environment.threads)
