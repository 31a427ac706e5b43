"""Continue episodes of an environment from a prefix: replay them up to the prefix, then play them to their end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from retrain.api import FAILED, EpisodeRunner, score, train_sampling, turn_stream
from retrain.errors import ComponentError, UserCodeError
from retrain.protocols import Sampler
from retrain.types import Completion, Prefix, Request, Rollout, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.api import RunContext
    from retrain.training.chat import RenderedPrompt


class ContinuedEpisodes:
    """Samples continuations of recorded episodes. Like `Continuations` it implements `continue_from`.

    An episode is restored to a prefix by playing it again, with the seed of its environment and the recorded actions.
    The sampler then completes the turn in which the prefix ends, and samples the later turns. Limits and timeouts
    apply as in the recorded episode.

    Args:
        context: the run; it has an environment.
    Raises:
        ComponentError: an environment declares that its episodes cannot be replayed.
    """

    def __init__(self, context: RunContext) -> None:
        assert context.env_pool is not None, "an episode without an environment is continued by `Continuations`"
        self._context = context
        self._pool = context.env_pool
        self._names = {label: hello.name for label, hello in self._pool.launch.hellos.items()}
        self._recorded: dict[int, tuple[list[Rollout], int]] = {}
        for label, traits in self._pool.traits.items():
            if not traits["replay"]:
                problem = f'episodes of environment "{self._names[label]}" cannot be replayed up to a prefix'
                raise ComponentError(problem, "if they can, declare it without replay=False")

    def record(self, rollouts: Sequence[Rollout], seed: int) -> None:
        """Add episodes that can be continued.

        Args:
            rollouts: the episodes; no earlier call had a group of the same number.
            seed: seed of the sampling settings with which they were played.
        """
        for rollout in rollouts:
            self._recorded.setdefault(rollout.group, ([], seed))[0].append(rollout)

    def __call__(
        self, problems: Mapping[int, RenderedPrompt], prefixes: Sequence[Prefix], count: int, seed: int
    ) -> tuple[Tensor, int]:
        """Play `count` continuations of each of P prefixes, about as many at once as a training step plays episodes.

        The draws of a continuation depend only on the seed and the index of its prefix.

        Args:
            problems: rendered problem of each group that a prefix belongs to.
            prefixes: prefixes of episodes of one call of `record`; each ends before a token of a turn.
            count: continuations of each prefix.
            seed: of sampling.
        Returns:
            Total rewards of the episodes [P, count] float32, NaN where an episode failed, and the number of tokens
            that were sampled after the prefixes.
        Raises:
            UserCodeError: a replay differs from the recorded episode, or too many episodes failed.
        """
        context = self._context
        sampler = _ReplayingSampler(context.sampler, seed)
        rewards = torch.empty(len(prefixes), count)
        # An environment may bear no more episodes at once than a training step plays. The negated division rounds up.
        parts = min(len(prefixes), -(-rewards.numel() // (context.prompts * context.config.training.group_size)))
        for part in range(parts):
            # Each part has prefixes of all problems, so that its share of failed episodes is that of the batch.
            requests = [
                Request(prefixes[index].ids, count, context.config.training.max_tokens, stream=index)
                for index in range(part, len(prefixes), parts)
            ]
            played = self._played(sampler, problems, prefixes[part::parts], requests)
            scores = [float("nan") if rollout.reward is None else rollout.reward for rollout in played]
            rewards[part::parts] = torch.tensor(scores).view(-1, count)
        return rewards, sampler.tokens

    def _played(
        self,
        sampler: _ReplayingSampler,
        problems: Mapping[int, RenderedPrompt],
        prefixes: Sequence[Prefix],
        requests: Sequence[Request],
    ) -> list[Rollout]:
        """Play and score the continuations of each prefix that its request selects."""
        context = self._context
        groups = sorted({prefix.group for prefix in prefixes})
        recorded = [self._place(prefix) for prefix in prefixes]
        sampler.turns = {
            stream: turn
            for request, (episode, last) in zip(requests, recorded, strict=True)
            for stream, turn in _turns(request, episode, last, self._names[episode.environment])
        }
        sampling = train_sampling(context.config, context.trained.loaded, self._recorded[groups[0]][1])
        runner = EpisodeRunner(sampler, context.chat, sampling, self._pool)
        rollouts = runner.roll([problems[prefix.group] for prefix in prefixes], requests)
        for number, rollout in enumerate(rollouts):
            episode, last = recorded[number // requests[0].count]
            # A replay that differs would measure the value of another state, without any error.
            if rollout.ended not in FAILED and _outcomes(rollout, last) != _outcomes(episode, last):
                raise _different(self._names[episode.environment])
            # Rewards that compare the members of a group compare all continuations of a problem.
            rollouts[number] = replace(rollout, group=groups.index(episode.group))
        rendered = [problems[group] for group in groups]
        return score(context.chat, context.pool, rendered, rollouts, context.config.training.max_tokens)

    def _place(self, prefix: Prefix) -> tuple[Rollout, int]:
        """Return an episode that begins with a prefix, and the index of the turn in which the prefix ends."""
        size = len(prefix.ids)
        return next(
            (rollout, turn)
            for rollout in self._recorded[prefix.group][0]
            if (*rollout.prompt_ids, *rollout.completion_ids)[:size] == prefix.ids
            for turn, (start, end) in enumerate(rollout.spans)
            if start <= size < end
        )


@dataclass(frozen=True)
class _RecordedTurn:
    """A turn to replay.

    Attributes:
        context: token ids before it.
        ids: its token ids; of the turn in which the prefix ends, those of the prefix.
        finish_reason: see `Turn`; None if the sampler completes the turn.
        environment: name of the environment, for the error message.
    """

    context: tuple[int, ...]
    ids: tuple[int, ...] = ()
    finish_reason: Literal["stop", "length"] | None = None
    environment: str = ""


def _turns(request: Request, recorded: Rollout, last: int, name: str) -> Iterator[tuple[int, _RecordedTurn]]:
    """Yield the turns to replay for each of the request's continuations, with the streams of the turns' requests.

    Args:
        request: request for a group of continuations; its `ids` are the prefix.
        recorded: the episode that begins with the prefix.
        last: index of the turn in which the prefix ends.
        name: name of the environment.
    """
    for number, (start, end) in enumerate(recorded.spans[: last + 1]):
        finish_reason = recorded.turns[number].finish_reason if number < last else None
        turn = _RecordedTurn(request.ids[:start], request.ids[start:end], finish_reason, name)
        if number == 0:
            yield request.stream, turn  # the members share the request for their first turn if their prompts are equal
        for member in range(request.count):
            yield turn_stream(request.stream, member, number), turn


class _ReplayingSampler(Sampler):
    """A sampler that replays recorded turns, and samples all other turns with another sampler.

    Args:
        sampler: the other sampler.
        seed: seed of its sampling settings. The seed of `EpisodeRunner`, from which the seeds of the environments
            derive, is that of the recorded episodes.

    Attributes:
        turns: the turns to replay, by the streams of their requests.
        tokens: number of sampled tokens.
    """

    def __init__(self, sampler: Sampler, seed: int) -> None:
        self._sampler = sampler
        self._seed = seed
        self.max_model_len = sampler.max_model_len
        self.turns: dict[int, _RecordedTurn] = {}
        self.tokens = 0

    def load_weights(self, weights: object, version: int) -> None:
        """Do nothing: the other sampler has the weights."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return the recorded turns of the requests, and completions of the turns that were not recorded to their end.

        Raises:
            UserCodeError: the context of a recorded turn has changed.
        """
        turns = [self.turns.get(request.stream, _RecordedTurn(request.ids)) for request in requests]
        for request, turn in zip(requests, turns, strict=True):
            # An observation of the replay changed before this turn, so that its recorded tokens no longer fit.
            if request.ids != turn.context:
                raise _different(turn.environment)
        rest = [
            replace(request, ids=request.ids + turn.ids, max_tokens=request.max_tokens - len(turn.ids))
            for request, turn in zip(requests, turns, strict=True)
            if turn.finish_reason is None
        ]
        sampled = iter(self._sampler.sample(rest, replace(sampling, seed=self._seed)) if rest else ())
        replies: list[list[Completion]] = []
        for request, turn in zip(requests, turns, strict=True):
            # Nobody reads the log-probs of a continuation; only its reward counts.
            logprobs = (0.0,) * len(turn.ids)
            if turn.finish_reason is not None:
                replies.append([Completion(turn.ids, logprobs, turn.finish_reason)] * request.count)
                continue
            completions = next(sampled)
            self.tokens += sum(len(new.ids) for new in completions)
            replies.append(
                [
                    replace(new, ids=turn.ids + new.ids, logprobs=logprobs + new.logprobs, versions=())
                    for new in completions
                ]
            )
        return replies


def _outcomes(rollout: Rollout, last: int) -> tuple[list[str], list[float]]:
    """Return the states before the turns up to number `last`, and the rewards of the turns before it."""
    return [turn.state for turn in rollout.turns[: last + 1]], [turn.reward for turn in rollout.turns[:last]]


def _different(environment: str) -> UserCodeError:
    return UserCodeError(
        f'environment "{environment}" does not repeat: an episode that was replayed with the same seed and actions '
        "gave another observation, reward or end; make it deterministic given its seed and the actions"
    )
