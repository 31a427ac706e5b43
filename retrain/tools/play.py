"""Play one episode in a terminal: a person or a run's model answers the environment."""

from __future__ import annotations

from collections.abc import Iterator

from retrain.config.loaded_config import LoadedConfig
from retrain.config.slots import labels
from retrain.environments.env_pool import EnvPool
from retrain.environments.text_episode import ending, text_episode
from retrain.errors import ConfigError
from retrain.functional.seeds import derive_seed
from retrain.run.before.environment_checks import launch
from retrain.run.collectors.rollouts import requests_for, roll, score
from retrain.run.run_context import RunContext
from retrain.training.chat import plain_text
from retrain.types import Problem


def by_hand(loaded: LoadedConfig, number: int, replies: Iterator[str]) -> Iterator[str]:
    """Play training problem `number` with the replies of a person.

    Args:
        replies: the person's replies; the episode stops without a reward when they are used up.
    Yields:
        Texts to show: the prompt, observations, rewards, and how the episode ended.
    Raises:
        ConfigError: the configuration has no environment.
    """
    config = loaded.config
    # A single-turn task has nothing that could answer a reply.
    if not labels(config):
        problem = "this configuration has no environment to play"
        raise ConfigError.at(loaded.file, "[environment] name", problem, "set name")
    problem = loaded.task(config.training.seed).problem(number)
    seed = derive_seed(config.training.seed, "play", problem.id)
    with EnvPool(launch(loaded)) as pool:
        yield plain_text(problem.prompt)
        for kind, text in text_episode(pool, problem.facts, seed, replies, config.training.max_tokens):
            yield text if kind == "environment" else f"[{kind} {text}]"


def by_model(context: RunContext, number: int) -> Iterator[str]:
    """Let a run's model play training problem `number`.

    Yields:
        Texts to show: the prompt, observations, replies (after "> "), rewards, and how the episode
        ended.
    """
    problem: Problem = context.task.problem(number)
    rendered = [(problem, context.chat.prompt_of(problem))]
    most = context.config.training.max_tokens
    sampling = context.trained.loaded.sampling(derive_seed(context.config.training.seed, "play"))
    rollouts = roll(context, rendered, requests_for(rendered, 1, most), sampling)
    [scored] = score(context.chat, context.pool, rendered, rollouts, most)
    yield scored.prompt
    position = 0
    for turn in scored.turns:
        # Tokens between two turns are the environment's.
        if observation := context.chat.decode(scored.completion_ids[position : turn.start]):
            yield observation
        yield f"> {context.chat.decode(scored.completion_ids[turn.start : turn.end])}"
        yield from [f"[reward {turn.reward:g}]"] if turn.reward else []
        position = turn.end
    yield f"[ended {ending(len(scored.turns), scored.ended or scored.finish_reason, scored.reward)}]"
