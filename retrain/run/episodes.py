"""Episodes: all that wait for the model are sampled in one call, a wave, and answered by the environment in another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

from retrain.errors import DataError, UserCodeError
from retrain.functional.seeds import derive_seed
from retrain.training.bridge import Bridge, Said
from retrain.training.chat import Chat, Prompt
from retrain.types import Completion, Metrics, Problem, Request, Rollout, Sampling, Turn

if TYPE_CHECKING:
    from retrain.environments.contract import Answer, Limits
    from retrain.environments.world_pool import Body, WorldPool

Posed = tuple[Problem, Prompt]
"""A problem with its prompt as the model sees it."""

CUT = "\n[... {} tokens left out ...]\n"
"""Stands for the middle of a long observation."""

FAILED = ("error", "timeout")
"""How an episode ends that has no reward."""


@dataclass(frozen=True)
class World:
    """The environment of a run.

    Attributes:
        pool: holds the live episodes.
        limits: of an episode.
        context: tokens that an episode may have in all.
        max_failed: share of the episodes of a call above which failing is an error.
    """

    pool: WorldPool
    limits: Limits
    context: float
    max_failed: float


class Speaker(Protocol):
    """What a player needs of a `Sampler`."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]: ...


@dataclass(frozen=True)
class Player:
    """Who speaks and who answers.

    Attributes:
        sampler: says the model's turns.
        chat: renders them.
        world: answers; without one every episode is one turn.
    """

    sampler: Speaker
    chat: Chat
    world: World | None = None


@dataclass
class _Episode:
    """One conversation as tokens. What was sampled is known by its turns and is never tokenized again.

    Attributes:
        key: its number in the call; group, member: whose it is, and which of them.
        stream: of its group's request.
        ids, logprobs: of everything after the prompt, 0 for what was not sampled.
        ended: as a rollout's; over: nothing more is to be sampled.
        left: tokens that it may still sample.
    """

    key: int
    problem: Problem
    prompt: Prompt
    group: int
    member: int
    stream: int
    left: int
    ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    turns: list[Turn] = field(default_factory=list[Turn])
    ended: str = ""
    over: bool = False
    detail: str = ""
    parts: dict[str, float] | None = None
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def context(self) -> tuple[int, ...]:
        return (*self.prompt.ids, *self.ids)


def turn_stream(stream: int, member: int, turn: int) -> int:
    """The stream of a turn after the first, whatever is sampled beside it."""
    return derive_seed(stream, "turn", member, turn)


def roll(
    player: Player, posed: Sequence[Posed], requests: Sequence[Request], sampling: Sampling, first: int = 0
) -> list[Rollout]:
    """Every problem's group of episodes, from number `first` on. Token ids stay as sampled; text is decoded.

    What an episode draws and sees depends on the sampling's seed, its group's stream, its place in the group and the
    turn alone: neither on the other episodes nor on who is waited for. All episodes of a group play the same game.

    Without a reward and with status "ok" a rollout is left to [[rewards]].

    Raises:
        UserCodeError: the environment failed in more episodes than may fail.
    """
    episodes = [
        _Episode(0, problem, prompt, group, member, request.stream, request.max_tokens)
        for group, ((problem, prompt), request) in enumerate(zip(posed, requests, strict=True), first)
        for member in range(request.count)
    ]
    game = _Game(player, sampling)
    for key, episode in enumerate(episodes):
        episode.key = key
    game.open(episodes)
    while live := [episode for episode in episodes if not episode.over]:
        wave = list(game.requests(live, [request.count for request in requests], first))
        groups = player.sampler.sample([request for request, _ in wave], sampling)
        heard: list[_Episode] = []
        for (_, members), completions in zip(wave, groups, strict=True):
            for episode in members:
                game.hear(episode, completions[episode.member if len(completions) > 1 else 0])
                heard.append(episode)
        game.answer(heard)
    game.finish(episodes)
    version = max((turn.weights_version for one in episodes for turn in one.turns), default=0)
    return [_rollout(player, episode, version) for episode in episodes]


class _Game:
    """The rules between a wave of the model's turns and the environment's answers."""

    def __init__(self, player: Player, sampling: Sampling) -> None:
        self._player, self._world, self._sampling = player, player.world, sampling
        self._bridge = Bridge(player.chat) if player.world else None

    def open(self, episodes: Iterable[_Episode]) -> None:
        """Begin; the environment may add to the prompt."""
        if self._world is None:
            return
        calls: dict[int, Body] = {}
        for one in episodes:
            facts = {key: getattr(one.problem, key) for key in ("id", "prompt", "answer", "extra")}
            calls[one.key] = ("open", one.key, facts, derive_seed(self._sampling.seed, "environment", one.problem.id))
        self._take(episodes, calls)

    def requests(
        self, live: Sequence[_Episode], counts: Sequence[int], first: int
    ) -> Iterable[tuple[Request, list[_Episode]]]:
        """What to sample, and for whom. The first turns of a group that sees one prompt are one request.

        The request asks for the whole group even if a member has failed already: the others draw what they would.
        """
        for (group, ids), several in groupby(live, lambda one: (one.group, one.context)):
            members = list(several)
            count = counts[group - first]
            if not members[0].turns and (len(members) == count or self._alike(members, live)):
                yield Request(ids, count, self._budget(members[0]), members[0].stream), members
                continue
            for one in members:
                stream = turn_stream(one.stream, one.member, len(one.turns))
                yield Request(ids, 1, self._budget(one), stream), [one]

    def hear(self, one: _Episode, completion: Completion) -> None:
        """Take a turn as it was sampled."""
        start = len(one.ids)
        one.ids += completion.ids
        one.logprobs += completion.logprobs
        one.left -= len(completion.ids)
        one.turns.append(Turn(start, len(one.ids), completion.finish_reason, completion.weights_version))

    def answer(self, heard: Sequence[_Episode]) -> None:
        """Have the environment answer the turns of a wave."""
        if self._world is None:
            for one in heard:
                one.over = True
            return
        calls: dict[int, Body] = {}
        for one in heard:
            turn = one.turns[-1]
            text = self._player.chat.decode(one.ids[turn.start : turn.end])
            calls[one.key] = ("reply", one.key, text, turn.finish_reason, len(one.turns) - 1, one.left)
        self._take(heard, calls)

    def finish(self, episodes: Sequence[_Episode]) -> None:
        """End what limits have ended; UserCodeError if too many failed."""
        if self._world is None:
            return
        self._world.pool.finish()
        failed = [one for one in episodes if one.ended in FAILED]
        if len(failed) > self._world.max_failed * len(episodes):
            raise UserCodeError(
                f"{len(failed)} of {len(episodes)} episodes failed, more than [reward_pool] max_failed = "
                f"{self._world.max_failed:g} allows; the first: {failed[0].detail}; mend the environment"
            )

    def _alike(self, members: Sequence[_Episode], live: Sequence[_Episode]) -> bool:
        """Whether those of a group that are live all see one prompt, though some have failed."""
        return len(members) == sum(one.group == members[0].group for one in live)

    def _budget(self, one: _Episode) -> int:
        if self._world is None:
            return one.left
        return int(min(self._world.limits.turn_tokens, one.left, self._room(one)))

    def _room(self, one: _Episode) -> float:
        assert self._world is not None
        return self._world.context - len(one.prompt.ids) - len(one.ids)

    def _take(self, episodes: Iterable[_Episode], calls: dict[int, Body]) -> None:
        assert self._world is not None
        answers = self._world.pool.step(calls)
        for one in episodes:
            try:
                self._said(one, answers[one.key])
            except DataError as error:  # messages that the template cannot render
                one.ended, one.over, one.detail = "error", True, str(error)

    def _said(self, one: _Episode, answer: Answer) -> None:
        assert self._world is not None
        limits = self._world.limits
        if answer.kind in FAILED:
            one.ended, one.over, one.detail = answer.kind, True, f"{answer.detail}\n{answer.trace}"
            return
        for name, value in answer.metrics.items():
            one.metrics[name] = one.metrics.get(name, 0.0) + value
        if one.turns:
            one.turns[-1] = replace(one.turns[-1], reward=answer.reward)
        if answer.kind == "end":
            one.ended, one.over, one.parts = "done", True, None if answer.parts is None else dict(answer.parts)
            return
        if len(one.turns) >= limits.max_turns or one.left <= 0:
            one.ended, one.over = "turns" if len(one.turns) >= limits.max_turns else "tokens", True
            return
        self._observe(one, answer)

    def _observe(self, one: _Episode, answer: Answer) -> None:
        """Append what the environment said, if there is room for a reply to it."""
        assert self._bridge is not None
        new: list[int] = []
        if one.turns:
            turn = one.turns[-1]
            new = self._bridge.ids(self._short(answer.messages), one.ids[-1] if turn.finish_reason == "stop" else None)
        elif answer.messages:
            one.prompt = self._bridge.opening(one.problem.prompt, answer.messages, answer.tools)
        if self._room(one) - len(new) < 1:
            one.ended, one.over = "context", True
            return
        one.ids += new
        one.logprobs += [0.0] * len(new)
        one.metrics["observation_tokens"] = one.metrics.get("observation_tokens", 0.0) + len(new)

    def _short(self, said: Said) -> Said:
        """Messages that are not longer than the limit, each cut in its middle."""
        assert self._world is not None
        most, chat = self._world.limits.observation_tokens, self._player.chat
        short: list[tuple[str, str]] = []
        for role, text in said:
            ids = chat.encode(text) if len(text) > most else []  # a token is at least one character
            if len(ids) > most:
                note = CUT.format(len(ids) - most)
                text = chat.decode(ids[: -(-most // 2)]) + note + chat.decode(ids[len(ids) - most // 2 :])
            short.append((role, text))
        return short


def _rollout(player: Player, one: _Episode, version: int) -> Rollout:
    """The episode with its reward, unless that is for [[rewards]] to say."""
    parts = one.parts
    if player.world is not None and one.ended in ("turns", "tokens", "context") and player.world.pool.traits["rewards"]:
        parts = {"env": 0.0}
    rollout = Rollout(
        problem_id=one.problem.id,
        prompt=one.prompt.text,
        answer=one.problem.answer,
        prompt_ids=one.prompt.ids,
        completion_ids=tuple(one.ids),
        sampler_logprobs=tuple(one.logprobs),
        text=player.chat.decode(one.ids),
        turns=tuple(one.turns) or (Turn(0, 0, "stop", version),),
        group=one.group,
        status=one.ended if one.ended in FAILED else "ok",
        ended=one.ended,
        metrics=one.metrics,
    )
    return rollout if parts is None or one.ended in FAILED else rewarded(rollout, sum(parts.values()), parts)


def rewarded(rollout: Rollout, value: float, parts: Mapping[str, float | None], correct: bool | None = None) -> Rollout:
    """The rollout with its turns' rewards and this value at its end; by default it is correct above 0.5.

    Where the environment names its parts, the first of them decides what is correct, without the turns' rewards.
    """
    given = sum(turn.reward for turn in rollout.turns)
    if correct is None:
        correct = (value + given if "env" in parts else next(iter(parts.values())) or 0.0) > 0.5
    parts = {**parts, "turns": given} if given else dict(parts)
    return replace(rollout, reward=value + given, parts=parts, correct=correct)


def world_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """env/turns, env/ended_*, and the means of what environments counted; nothing without an environment."""
    played = [one for one in rollouts if one.ended]
    if not played:
        return {}
    found = {"env/turns": sum(len(one.turns) for one in played) / len(played)}
    for ended in ("done", "turns", "tokens", "context", *FAILED):
        found[f"env/ended_{ended}"] = sum(one.ended == ended for one in played) / len(played)
    for name in sorted({name for one in played for name in one.metrics}):
        found[f"env/{name}"] = sum(one.metrics.get(name, 0.0) for one in played) / len(played)
    return found
