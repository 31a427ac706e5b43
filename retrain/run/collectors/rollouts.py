"""Sample and score the groups of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from retrain.errors import DataError
from retrain.protocols import Task
from retrain.rewards.signatures import completion_item
from retrain.run.episodes import EpisodeRunner
from retrain.run.run_context import RunContext
from retrain.system.model_paths import positions
from retrain.training.chat import Chat, RenderedPrompt
from retrain.types import Request, Rollout, Sampling

if TYPE_CHECKING:
    from retrain.config.schema import Config
    from retrain.rewards.pool import RewardPool
    from retrain.training.model.loading import Loaded

_MOST_TOO_LONG = 1000
"""The run ends if one step draws this many prompts that are too long."""


def sampled(
    context: RunContext, cursor: int, prompts: int, seed: int, first: int = 0
) -> tuple[list[Rollout], dict[int, RenderedPrompt], int]:
    """Sample and score the groups of the next `prompts` problems.

    Args:
        cursor: index of the task's next unused problem.
        seed: of sampling.
        first: number of the first group.
    Returns:
        The scored rollouts, the rendered problem of each group by number, and the new cursor.
    """
    training = context.config.training
    rendered, after = next_problems(context, cursor, prompts)
    requests = requests_for(rendered, training.group_size, training.max_tokens)
    rollouts = roll(context, rendered, requests, train_sampling(context.config, context.trained.loaded, seed), first)
    rollouts = score(context.chat, context.pool, rendered, rollouts, training.max_tokens)
    # One more completion per prompt costs time, so it is sampled only for credit that reads it.
    if "greedy_rewards" in context.trained.pipeline.reads:
        single = requests_for(rendered, 1, training.max_tokens)
        best = roll(context, rendered, single, greedy_sampling(context), first)
        rollouts = with_greedy(rollouts, score(context.chat, context.pool, rendered, best, training.max_tokens))
    return rollouts, dict(enumerate(rendered, first)), after


def next_problems(context: RunContext, cursor: int, count: int) -> tuple[list[RenderedPrompt], int]:
    """Return the next problems whose prompts fit the run's limits, and the new cursor; see `draw`."""
    training = context.config.training
    # Prompt and completion share the model's positions.
    left = positions(context.trained.loaded.model) - training.max_tokens
    most = training.max_prompt_tokens or float("inf")
    limit = "[training] max_prompt_tokens allows" if most <= left else "max_tokens leaves of the model's positions"
    return draw(context.task, context.chat, min(left, most), cursor, count, limit)


def with_greedy(rollouts: Sequence[Rollout], greedy: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts with the reward of their group's greedy completion, or without a reward if it has none."""
    greedy_by_group = {rollout.group: rollout for rollout in greedy}
    return [
        replace(rollout, greedy=best.reward)
        if best.reward is not None
        else replace(rollout, reward=None, status=best.status)
        for rollout in rollouts
        for best in (greedy_by_group[rollout.group],)
    ]


def roll(
    context: RunContext,
    rendered: Sequence[RenderedPrompt],
    requests: Sequence[Request],
    sampling: Sampling,
    first: int = 0,
) -> list[Rollout]:
    """Sample one group for every problem: completions, or episodes if there is an environment.

    Every rank calls this and gets the same rollouts. Only rank 0 has environment processes.

    Args:
        first: number of the first group.
    """
    sampler, chat, pool = context.sampler, context.chat, context.env_pool
    if pool is None:
        return EpisodeRunner(sampler, chat, sampling).roll(rendered, requests, first)
    return sampler.run_on_rank0(
        lambda engine: EpisodeRunner(engine, chat, sampling, pool).roll(rendered, requests, first)
    )


def draw(
    task: Task, chat: Chat, most_tokens: float, cursor: int, count: int, limit: str
) -> tuple[list[RenderedPrompt], int]:
    """Return the next `count` rendered problems whose prompts have at most `most_tokens` tokens.

    Longer prompts are skipped, because a single one must not end a run of many hours.

    Args:
        cursor: index of the task's next unused problem.
        limit: origin of `most_tokens`, for the error message: completes "longer than the tokens that ...".
    Returns:
        The problems, and the new cursor.
    Raises:
        DataError: 1000 prompts in one step are too long.
    """
    rendered, too_long = list[RenderedPrompt](), list[int]()
    while len(rendered) < count:
        if len(too_long) >= _MOST_TOO_LONG:
            raise DataError(
                f"{_MOST_TOO_LONG} prompts in one step are longer than the {most_tokens:g} tokens that {limit}: they "
                f"have {min(too_long)} to {max(too_long)} tokens; change the limit, or the data"
            )
        problem = task.problem(cursor)
        prompt = chat.prompt_of(problem)
        cursor += 1
        if len(prompt.ids) <= most_tokens:
            rendered.append((problem, prompt))
        else:
            too_long.append(len(prompt.ids))
    return rendered, cursor


def greedy_sampling(context: RunContext) -> Sampling:
    """Return the sampling settings of the greedy completions that credit compares with."""
    # Greedy decoding draws no random numbers, so any seed will do.
    return replace(train_sampling(context.config, context.trained.loaded, 0), temperature=0.0)


def train_sampling(config: Config, loaded: Loaded, seed: int) -> Sampling:
    """Return the sampling settings of training.

    The trainer computes log-probs at the same temperature. Nothing is truncated by top_p or top_k, because the trainer
    computes the full distribution.
    """
    return loaded.sampling(seed, config.training.temperature)


def requests_for(rendered: Sequence[RenderedPrompt], count: int, max_tokens: int) -> list[Request]:
    """Return a request for `count` completions of each prompt.

    The random stream of a request is the index of its prompt.
    """
    return [Request(prompt.ids, count, max_tokens, stream) for stream, (_, prompt) in enumerate(rendered)]


def score(
    chat: Chat, pool: RewardPool, rendered: Sequence[RenderedPrompt], rollouts: Sequence[Rollout], max_tokens: int
) -> list[Rollout]:
    """Return the rollouts with reward, parts, correctness and status from `[[rewards]]`.

    Rollouts that an environment has rewarded, or that failed, stay as they are. Rewards get only the
    last turn of an episode with several turns.

    Args:
        rendered: the problems; the group with the smallest number belongs to the first.
    """
    first = min((rollout.group for rollout in rollouts), default=0)
    waiting = [index for index, rollout in enumerate(rollouts) if rollout.reward is None and rollout.status == "ok"]
    items: list[dict[str, Any]] = []
    for rollout in (rollouts[index] for index in waiting):
        (problem, _), last, ids = rendered[rollout.group - first], rollout.turns[-1], rollout.completion_ids
        text = chat.decode(ids[last.start :]) if last.start else rollout.text
        item = completion_item(problem, rollout.prompt, text, ids, max_tokens, rollout.group)
        # The ids of an episode are also those of observations, and its end may be a limit.
        items.append(item | {"length": rollout.length, "finish_reason": rollout.finish_reason})
    scored = list(rollouts)
    for index, s in zip(waiting, pool.score(items), strict=True):
        scored[index] = replace(rollouts[index], parts=dict(s.parts), correct=s.correct, status=s.status)
        if s.value is not None:
            scored[index] = scored[index].rewarded(s.value, s.parts, s.correct)
    return scored


def valid_rows(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Return the rollouts that have a reward, without groups that failures reduced to one rollout.

    A group sampled with one rollout is kept.
    """
    valid = [rollout for rollout in rollouts if rollout.reward is not None]
    sampled, scored = (Counter(rollout.group for rollout in some) for some in (rollouts, valid))
    return [rollout for rollout in valid if scored[rollout.group] >= min(2, sampled[rollout.group])]
