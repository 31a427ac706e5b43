"""Environments that were written for other libraries, as they are. Needs nothing of this package's own dependencies."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from retrain import Say, environment
from retrain.environments.contract import Game, Limits
from retrain.environments.tools import called, importable, load_object

_OF_TRL = ("reset", "get_reward")


@environment(
    "trl",
    check_code=importable("factory", "parser"),
    imports=(
        "factory",
        "parser",
    ),
)
def trl(  # noqa: PLR0913 - four fields of the problem and three keys, each with its name
    prompt: Any,
    answer: str,
    extra: Mapping[str, Any],
    limits: Limits,
    *,
    factory: str,
    parser: str = "hermes",
    describe: bool = True,
) -> Game:
    """A class, or another callable without arguments, for `environment_factory` of TRL's GRPOTrainer.

    `reset(prompt=, answer=, **extra)` begins and returns what is added to the prompt, or None. The other public
    methods are tools (see the environment "tools"). The first reply that calls none ends the episode, as max_turns
    and the token budget do; `get_reward()`, if there is one, is its reward, and otherwise [[rewards]] score it.

    Args:
        factory: dotted path.
        parser, describe: as for "tools".
    """
    world = load_object(factory)()
    methods = {name: method for name, method in inspect.getmembers(world, inspect.ismethod) if not name.startswith("_")}
    first = world.reset(**{"prompt": prompt, "answer": answer, **extra})
    named = {name: method for name, method in methods.items() if name not in _OF_TRL}
    yield from called(named, parser, describe, None if first is None else str(first), limits)
    return float(world.get_reward()) if "get_reward" in methods else None


@environment("skyrl", check_code=importable("env_class"), imports=("env_class",))
def skyrl(
    prompt: Any,
    answer: str,
    extra: Mapping[str, Any],
    limits: Limits,
    *,
    env_class: str,
    config: dict[str, Any] | None = None,
) -> Game:
    """A `BaseTextEnv` of SkyRL-gym: `init(prompt)`, and `step(reply)` until it is done.

    What `init` returns begins with the prompt as it is; ValueError if not.
    Its `extras` are the problem's, with `reward_spec.ground_truth` = the answer and `max_turns` unless they have them.

    Args:
        env_class: dotted path.
        config: its `env_config`.
    """
    spec = {"reward_spec": {"method": "rule", "ground_truth": answer}, "max_turns": limits.max_turns}
    world = load_object(env_class)(env_config=config or {}, extras=spec | dict(extra))
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    messages, _ = world.init([dict(one) for one in asked])
    if messages[: len(asked)] != asked:
        raise ValueError("init changed the prompt, which stands; let it add messages behind, and change the data")
    reply = yield [dict(one) for one in messages[len(asked) :]]
    while not (found := world.step(str(reply)))["done"]:
        said = found["observations"]
        text, role = "\n".join(one["content"] for one in said), said[-1]["role"] if said else "user"
        reply = yield Say(text, reward=float(found["reward"]), role=role)
    world.close()
    return float(found["reward"])


@environment(
    "openenv",
    check_code=importable("env_class", "action", "show"),
    imports=(
        "env_class",
        "action",
        "show",
    ),
)
def openenv(seed: int, *, env_class: str, action: str, show: str = "builtins.str") -> Game:
    """An `Environment` of OpenEnv in the worker's process: `reset(seed=)`, and `step(action)` until it is done.

    Args:
        env_class: dotted path.
        action: dotted path of what makes an action of the reply's text.
        show: dotted path of what makes a text of an observation.
    """
    act, text, world = load_object(action), load_object(show), load_object(env_class)()
    seen = world.reset(seed=seed % 2**31)
    reply = yield text(seen)
    while not (seen := world.step(act(str(reply)))).done:
        reply = yield Say(text(seen), reward=float(seen.reward or 0))
    return float(seen.reward or 0)
