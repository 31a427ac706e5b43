"""Adapters for environments of other libraries. This module uses none of retrain's dependencies."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from retrain.environments.contract import EpisodeGenerator, Limits, Observation, environment
from retrain.environments.tools import called, importable, load_object

_OF_TRL = ("reset", "get_reward")
"""Methods of a TRL environment that are not tools."""


@environment("trl", check=importable("factory", "parser"))
def trl(  # noqa: PLR0913 - four fields of the problem and three keys, each with its name
    prompt: Any,
    answer: str,
    extra: Mapping[str, Any],
    limits: Limits,
    *,
    factory: str,
    parser: str = "hermes",
    describe: bool = True,
) -> EpisodeGenerator:
    """Environment with the interface of `environment_factory` of TRL's GRPOTrainer.

    `reset(prompt=, answer=, **extra)` starts an episode and returns text to add to the prompt, or
    None. The other public methods are tools (see the environment "tools"). The episode ends at the
    first action without a tool call, at max_turns, or when the token budget is used up. Its reward
    is `get_reward()`; without this method, [[rewards]] score it.

    Args:
        factory: dotted path of a class or another callable without arguments.
        parser, describe: as for "tools".
    """
    env = load_object(factory)()
    methods = {name: method for name, method in inspect.getmembers(env, inspect.ismethod) if not name.startswith("_")}
    # A column of the data goes before the field of the same name.
    first = env.reset(**{"prompt": prompt, "answer": answer, **extra})
    named = {name: method for name, method in methods.items() if name not in _OF_TRL}
    yield from called(named, parser, describe, None if first is None else str(first), limits)
    return float(env.get_reward()) if "get_reward" in methods else None


@environment("skyrl", check=importable("env_class"))
def skyrl(
    prompt: Any,
    answer: str,
    extra: Mapping[str, Any],
    limits: Limits,
    *,
    env_class: str,
    config: dict[str, Any] | None = None,
) -> EpisodeGenerator:
    """A `BaseTextEnv` of SkyRL-gym: calls `init(prompt)`, then `step(action)` until it is done.

    The messages from `init` must start with the unchanged prompt. `extras` are the problem's extra
    fields; `reward_spec.ground_truth` (the answer) and `max_turns` are added if they are missing.

    Args:
        env_class: dotted path of the class.
        config: the `env_config` that its constructor gets.
    Raises:
        ValueError: `init` changed the prompt.
    """
    spec = {"reward_spec": {"method": "rule", "ground_truth": answer}, "max_turns": limits.max_turns}
    env = load_object(env_class)(env_config=config or {}, extras=spec | dict(extra))
    # SkyRL's environments take messages only.
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    messages, _ = env.init([dict(message) for message in asked])
    if messages[: len(asked)] != asked:
        raise ValueError("init changed the prompt; let it only append messages, and change prompts in the data")
    reply = yield [dict(message) for message in messages[len(asked) :]]
    while not (outcome := env.step(str(reply)))["done"]:
        new = outcome["observations"]
        text = "\n".join(message["content"] for message in new)
        role = new[-1]["role"] if new else "user"
        reply = yield Observation(text, reward=float(outcome["reward"]), role=role)
    env.close()
    return float(outcome["reward"])


@environment("openenv", check=importable("env_class", "action", "show"))
def openenv(seed: int, *, env_class: str, action: str, show: str = "builtins.str") -> EpisodeGenerator:
    """An `Environment` of OpenEnv in the worker process: calls `reset(seed=)`, then `step(action)` until it is done.

    Args:
        env_class: dotted path of the class.
        action: dotted path of a function from the model's text to an action.
        show: dotted path of a function from an observation to text.
    """
    act, text = load_object(action), load_object(show)
    env = load_object(env_class)()
    # Some environments only take seeds that fit a signed 32-bit integer.
    seen = env.reset(seed=seed % 2**31)
    reply = yield text(seen)
    while not (seen := env.step(act(str(reply)))).done:
        reply = yield Observation(text(seen), reward=float(seen.reward or 0))
    return float(seen.reward or 0)
