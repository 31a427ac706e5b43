"""One episode in a terminal: a person answers the environment, or a run's model does."""

from __future__ import annotations

from collections.abc import Iterator

from retrain.config.environment_checks import launch
from retrain.config.resolve import LoadedConfig, labels
from retrain.environments.env_pool import EnvPool
from retrain.environments.text_episode import ending, text_episode
from retrain.errors import ConfigError, ConfigProblem
from retrain.functional.seeds import derive_seed
from retrain.run.collect import requests_for, roll, score
from retrain.run.run_context import RunContext
from retrain.training.chat import plain_text
from retrain.types import Problem, Sampling


def by_hand(loaded: LoadedConfig, number: int, replies: Iterator[str]) -> Iterator[str]:
    """What is said to a person who plays training problem `number`; it ends with the reward, or with the replies."""
    config = loaded.config
    if not labels(config):
        problem = "there is nothing to play: this configuration has no environment"
        raise ConfigError([ConfigProblem(loaded.file, 0, 0, "[environment] name", problem, "set name")])
    posed = loaded.task(config.training.seed).problem(number)
    seed = derive_seed(config.training.seed, "play", posed.id)
    with EnvPool(launch(config, loaded.components)) as pool:
        yield plain_text(posed.prompt)
        for kind, text in text_episode(pool, posed.facts, seed, replies, config.training.max_tokens):
            yield text if kind == "environment" else f"[{kind} {text}]"


def by_model(context: RunContext, number: int) -> Iterator[str]:
    """The same problem, played by a run's model: what it and the environment say, in turn."""
    problem: Problem = context.task.problem(number)
    posed, most = [(problem, context.chat.prompt(problem.prompt))], context.config.training.max_tokens
    sampling = Sampling(stop_ids=context.loaded.stop_ids, seed=derive_seed(context.config.training.seed, "play"))
    rollouts = roll(context, posed, requests_for(posed, 1, most), sampling)
    [one] = score(context.chat, context.pool, posed, rollouts, most)
    yield one.prompt
    heard = 0
    for turn in one.turns:
        if said := context.chat.decode(one.completion_ids[heard : turn.start]):
            yield said
        yield f"> {context.chat.decode(one.completion_ids[turn.start : turn.end])}"
        yield from [f"[reward {turn.reward:g}]"] if turn.reward else []
        heard = turn.end
    yield f"[ended {ending(len(one.turns), one.ended or one.finish_reason, one.reward)}]"
