"""Episodes: all that wait for the model are sampled in one call, a wave, and answered by their environment in another.

With several workers each has its share of the groups, in a thread, and waits for no other. Workers with threads of
their own answer one episode while the engine samples for others: then none waits for the tool of another.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from retrain.errors import DataError, EngineError
from retrain.functional.seeds import derive_seed
from retrain.protocols import Sampler
from retrain.training.bridge import Bridge, Transcript
from retrain.training.chat import Chat, Posed
from retrain.types import Ask, Completion, Hear, Metrics, Problem, Request, Rollout, Sampling, Turn, fits_float32

if TYPE_CHECKING:
    from retrain.environments.contract import Answer
    from retrain.environments.world import World
    from retrain.environments.world_pool import Body, WorldPool

FAILED = ("error", "timeout")
"""How an episode ends that has no reward."""


@dataclass(frozen=True)
class Player:
    """Who speaks and who answers.

    Attributes:
        sampler: says the model's turns.
        chat: renders them.
        world: answers.
    """

    sampler: Sampler
    chat: Chat
    world: World


@dataclass
class _Episode(Transcript):
    """One conversation.

    Attributes:
        key: its number in the call; group, member: whose it is, and which of them.
        stream: of its group's request.
        ended: as a rollout's; over: nothing more is to be sampled.
        left: tokens that it may still sample.
    """

    key: int
    problem: Problem
    group: int
    member: int
    stream: int
    left: int
    ended: str = ""
    over: bool = False
    detail: str = ""
    parts: dict[str, float] | None = None
    metrics: Metrics = field(default_factory=Metrics)


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
    keys = count()
    episodes = [
        _Episode(prompt, next(keys), problem, group, member, request.stream, request.max_tokens)
        for group, ((problem, prompt), request) in enumerate(zip(posed, requests, strict=True), first)
        for member in range(request.count)
    ]
    counts = {group: request.count for group, request in enumerate(requests, first)}
    world = player.world
    if world.pools[0].threads > 1:
        _Flow([(_Game(player, sampling, counts, pool), pool) for pool in world.pools], episodes).play()
    elif len(world.pools) == 1:
        _play(_Game(player, sampling, counts, world.pools[0]), episodes)
    else:
        lanes = [[one for one in episodes if one.group % len(world.pools) == lane] for lane in range(len(world.pools))]
        games = [_Game(player, sampling, counts, pool) for pool in world.pools]
        with ThreadPoolExecutor(len(lanes), "episodes") as threads:
            try:
                list(threads.map(_play, games, lanes))
            except BaseException:
                world.over.set()
                raise
    world.check([one.detail for one in episodes if one.ended in FAILED], len(episodes))
    version = max((turn.weights_version for one in episodes for turn in one.turns), default=0)
    return [_rollout(player, episode, version) for episode in episodes]


def _play(game: _Game, episodes: Sequence[_Episode]) -> None:
    """Play these episodes to their ends, in waves."""
    game.open(episodes)
    while live := [episode for episode in episodes if not episode.over]:
        wave = list(game.requests(live))
        heard: list[_Episode] = []
        for (_, members), completions in zip(wave, game.sample([request for request, _ in wave]), strict=True):
            heard += game.hear(members, completions)
        game.answer(heard)
    game.finish()


class _Flow:
    """Plays episodes to their ends, each as fast as the engine and its own environment answer.

    Args:
        shares: the game of each pool, in which a share of the groups is played.
    """

    def __init__(self, shares: Sequence[tuple[_Game, WorldPool]], episodes: Sequence[_Episode]) -> None:
        self._games, self._pools = zip(*shares, strict=True)
        self._live = {one.key: one for one in episodes}
        self._groups: defaultdict[int, list[_Episode]] = defaultdict(list)
        for one in episodes:
            self._groups[one.group].append(one)
        self._opening = {group: {one.key for one in members} for group, members in self._groups.items()}
        self._asked: dict[int, list[_Episode]] = {}

    def play(self) -> None:
        """Until none is live."""
        try:
            for group, members in self._groups.items():
                self._game(group).begin(members)
            self._games[0].keep_sampling(self._ask, self._hear)
        except BaseException:
            for pool in self._pools:
                pool.close()
            raise
        for game in self._games:
            game.finish()

    def _game(self, group: int) -> _Game:
        return self._games[group % len(self._games)]

    def _ask(self, idle: bool) -> list[Request] | None:
        while True:
            found = [request for game in self._games for request in self._turns(game)]
            self._live = {key: one for key, one in self._live.items() if not one.over}
            if found or not idle:
                return found
            if not self._live:
                return None
            busy = [pool for pool in self._pools if pool.busy]
            wait([pool.fileno() for pool in busy], max(0.0, min(pool.deadline for pool in busy) - time.monotonic()))

    def _turns(self, game: _Game) -> Iterator[Request]:
        """What is to be sampled for episodes that have been answered; first turns once their group has begun."""
        for one in game.heard(self._live):
            members = [one]
            if not one.turns:
                left = self._opening.get(one.group, set())
                left.discard(one.key)
                members = self._groups[one.group] if not left and self._opening.pop(one.group, None) is not None else []
            for request, several in game.requests([member for member in members if not member.over]):
                self._asked[request.stream] = several
                yield request

    def _hear(self, request: Request, completions: Sequence[Completion]) -> None:
        members = self._asked.pop(request.stream)
        game = self._game(members[0].group)
        game.reply(game.hear([one for one in members if not one.over], completions))


class _Game:
    """The rules between a wave of the model's turns and the answers of an environment's pool.

    Args:
        counts: episodes of each group.
    """

    def __init__(self, player: Player, sampling: Sampling, counts: Mapping[int, int], pool: WorldPool) -> None:
        self._player, self._world, self._pool = player, player.world, pool
        self._sampling = replace(sampling, continued=True)
        self._bridge = Bridge(player.chat)
        self._counts = counts

    def keep_sampling(self, ask: Ask, hear: Hear) -> None:
        """What the model says, until there is nothing left to ask."""
        self._player.sampler.keep_sampling(ask, hear, self._sampling)

    def sample(self, requests: Sequence[Request]) -> list[list[Completion]]:
        """What the model says; EngineError once the run has ended."""
        with self._world.turn:
            if self._world.over.is_set():
                raise EngineError("sampling has been broken off")
            return self._player.sampler.sample(requests, self._sampling)

    def open(self, episodes: Iterable[_Episode]) -> None:
        """Begin; the environment may add to the prompt."""
        self._take(episodes, self._pool.step(self._openings(episodes)))

    def begin(self, episodes: Iterable[_Episode]) -> None:
        """The same, without waiting for the environment."""
        self._pool.give(self._openings(episodes))

    def _openings(self, episodes: Iterable[_Episode]) -> dict[int, Body]:
        seeds = {one.key: derive_seed(self._sampling.seed, "environment", one.problem.id) for one in episodes}
        return {one.key: ("open", one.key, one.problem.facts, seeds[one.key]) for one in episodes}

    def requests(self, live: Sequence[_Episode]) -> Iterable[tuple[Request, list[_Episode]]]:
        """What to sample, and for whom. The first turns of a group that sees one prompt are one request.

        The request asks for the whole group even if a member has failed already: the others draw what they would.
        """
        for (group, ids), several in groupby(live, lambda one: (one.group, one.context)):
            members = list(several)
            size = self._counts[group]
            if not members[0].turns and (len(members) == size or self._alike(members, live)):
                yield Request(ids, size, self._budget(members[0]), members[0].stream), members
                continue
            for one in members:
                stream = turn_stream(one.stream, one.member, len(one.turns))
                yield Request(ids, 1, self._budget(one), stream), [one]

    def hear(self, members: Sequence[_Episode], completions: Sequence[Completion]) -> Sequence[_Episode]:
        """Take turns as they were sampled, of one request; returns whose they are."""
        for one in members:
            completion = completions[one.member if len(completions) > 1 else 0]
            one.hear(completion)
            one.left -= len(completion.ids)
        return members

    def answer(self, heard: Sequence[_Episode]) -> None:
        """Have the environment answer the turns of a wave."""
        self._take(heard, self._pool.step(self._replies(heard)))

    def reply(self, heard: Sequence[_Episode]) -> None:
        """The same, without waiting for the environment."""
        self._pool.give(self._replies(heard))

    def heard(self, live: Mapping[int, _Episode]) -> list[_Episode]:
        """Those of the episodes, by number, that the environment has answered since the last call."""
        answers = self._pool.look()
        found = [live[key] for key in answers if key in live]
        self._take(found, answers)
        return found

    def _replies(self, heard: Sequence[_Episode]) -> dict[int, Body]:
        calls: dict[int, Body] = {}
        for one in heard:
            turn = one.turns[-1]
            text = self._player.chat.decode(one.ids[turn.start : turn.end])
            calls[one.key] = ("reply", one.key, text, turn.finish_reason, len(one.turns) - 1, one.left)
        return calls

    def finish(self) -> None:
        """End what limits have ended."""
        self._pool.finish()

    def _alike(self, members: Sequence[_Episode], live: Sequence[_Episode]) -> bool:
        """Whether those of a group that are live all see one prompt, though some have failed."""
        return len(members) == sum(one.group == members[0].group for one in live)

    def _budget(self, one: _Episode) -> int:
        return int(min(self._world.limits.turn_tokens, one.left, self._room(one)))

    def _room(self, one: _Episode) -> float:
        known = min(self._world.context, self._player.sampler.room)
        return known - len(one.prompt.ids) - len(one.ids)

    def _take(self, episodes: Iterable[_Episode], answers: Mapping[int, Answer]) -> None:
        for one in episodes:
            try:
                self._said(one, answers[one.key])
            except DataError as error:  # messages that the template cannot render
                one.ended, one.over, one.detail = "error", True, str(error)

    def _said(self, one: _Episode, answer: Answer) -> None:
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
            if not fits_float32(sum((*(one.parts or {}).values(), *(turn.reward for turn in one.turns)))):
                one.ended, one.detail = "error", "OverflowError: its rewards sum to no finite number"
            return
        if len(one.turns) >= limits.max_turns or one.left <= 0:
            one.ended, one.over = "turns" if len(one.turns) >= limits.max_turns else "tokens", True
            return
        self._observe(one, answer)

    def _observe(self, one: _Episode, answer: Answer) -> None:
        """Append what the environment said, if there is room for a reply to it."""
        new: list[int] = []
        if one.turns:
            said = self._bridge.short(answer.messages, self._world.limits.observation_tokens)
            new = self._bridge.ids(said, one.end)
        elif answer.messages or answer.tools_text:
            opening = answer.messages, answer.tools, answer.tools_text
            one.prompt = self._bridge.opening(one.problem.prompt, *opening)
        if self._room(one) - len(new) < 1:
            one.ended, one.over = "context", True
            return
        one.observe(new)
        one.metrics["observation_tokens"] = one.metrics.get("observation_tokens", 0.0) + len(new)


def _rollout(player: Player, one: _Episode, version: int) -> Rollout:
    """The episode with its reward, unless that is for [[rewards]] to say."""
    parts = one.parts
    if one.ended in ("turns", "tokens", "context") and player.world.pools[0].traits[one.problem.environment]["rewards"]:
        parts = {"env": 0.0}
    turns = tuple(one.turns) or (Turn(0, 0, "stop", version),)
    rollout = player.chat.rollout((one.problem, one.prompt), one.group, one.ids, one.logprobs, turns)
    status = one.ended if one.ended in FAILED else "ok"
    rollout = replace(rollout, status=status, ended=one.ended, metrics=one.metrics)
    return rollout if parts is None or one.ended in FAILED else rollout.rewarded(sum(parts.values()), parts)
