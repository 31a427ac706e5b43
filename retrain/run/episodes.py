"""Episodes: model and environment take turns. Without an environment, an episode has one turn.

Each group is a coroutine. If its members see the same prompt, one request samples their first
turns together. Then each member runs in its own coroutine: it samples a completion, steps the
environment, appends the observation, and repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import TYPE_CHECKING

from retrain.engines.batching import Lane, lanes
from retrain.errors import DataError
from retrain.functional.seeds import derive_seed
from retrain.protocols import Sampler
from retrain.system import event_loop
from retrain.training.chat import Chat, RenderedPrompt, Transcript
from retrain.types import Completion, Metrics, Problem, Request, Rollout, Sampling, Turn, is_reward

if TYPE_CHECKING:
    from retrain.environments.contract import Answer
    from retrain.environments.env_pool import Env, EnvPool

_OPENING = "opening"
"""Key of the state before the first turn, if the environment does not name the state."""
FAILED = ("error", "timeout")
"""Values of `Episode.ended` for episodes that failed and so have no reward."""
_sessions = count()
"""Thread-safe counter of sessions: each group of episodes gets a number, see `Request.session`."""


@dataclass(eq=False)
class Episode(Transcript):
    """An episode in progress: the conversation of the model with an environment, as token ids.

    Attributes:
        group: number of its group in the step.
        member: index in its group.
        call_index: index among all episodes of one call of `EpisodeRunner.roll`.
        stream: random stream of its group's request.
        session: number of its group's session, see `Request.session`; None without an environment.
        left: number of tokens that the model may still sample.
        env: the environment; None if the run has none.
        state: key of the environment's present state, see `Answer.state`.
        ended: reason why the episode ended, see `Rollout.ended`; "" while it runs, and without an environment.
        over: True if no more turns are sampled.
        detail: error message and traceback of a failed episode.
        parts: rewards that the environment returned at the end, by name; None if it returned none.
        metrics: counts of the environment, and observation tokens, summed over the episode.
    """

    problem: Problem
    group: int
    member: int
    call_index: int
    stream: int
    left: int
    session: int | None = None
    env: Env | None = None
    state: str = ""
    ended: str = ""
    over: bool = False
    detail: str = ""
    parts: dict[str, float] | None = None
    metrics: Metrics = field(default_factory=Metrics)

    def finish(self, how: str, detail: str = "") -> None:
        """Mark the episode as ended; its environment is closed later, with its group.

        Args:
            how: value of `ended`.
            detail: error message and traceback if the episode failed.
        """
        self.ended, self.over, self.detail = how, True, detail

    def count(self, name: str, value: float) -> None:
        """Add `value` to the metric `name`."""
        self.metrics[name] = self.metrics.get(name, 0.0) + value


def turn_stream(stream: int, member: int, turn: int) -> int:
    """Return the random stream of one episode's turn, independent of other episodes in the batch.

    Args:
        stream: random stream of the group's request.
        member: index of the episode in its group.
        turn: index of the turn.
    """
    return derive_seed(stream, "turn", member, turn)


class EpisodeRunner:
    """Samples groups of episodes.

    Args:
        sampler: engine that samples the model's turns.
        chat: renders prompts and observations.
        sampling: sampling settings of every turn.
        pool: processes of the environment; None for single completions.
    """

    def __init__(self, sampler: Sampler, chat: Chat, sampling: Sampling, pool: EnvPool | None = None) -> None:
        self._sampler, self._chat, self._sampling, self._pool = sampler, chat, sampling, pool
        self._lanes: Sequence[Lane] = ()
        self._continuous = False
        if pool is not None:
            self._sampling, self._limits = replace(sampling, continued=True), pool.limits
            from retrain.training.chat_stitcher import ChatStitcher

            self._stitcher = ChatStitcher(chat)

    def roll(self, rendered: Sequence[RenderedPrompt], requests: Sequence[Request], first: int = 0) -> list[Rollout]:
        """Sample one group of episodes for each problem, and return their rollouts in the order of the problems.

        A rollout has the token ids that the model sampled; they are never re-tokenized. The random
        draws of a turn depend only on the seed, the request's stream and count, the index of the
        episode in its group, and the turn. All episodes of a group reset the environment with the same
        seed. A rollout with status "ok" and no reward is scored later by [[rewards]].

        Args:
            rendered: the problems with their prompts.
            requests: one request for each problem; `count` is the size of its group.
            first: number of the first group.
        Raises:
            UserCodeError: more episodes failed than [reward_pool] max_failed allows.
        """
        try:
            episodes = event_loop.run(self._groups(rendered, requests, first))
        except BaseException:
            if self._pool is not None:
                self._pool.close()  # cancelling a coroutine does not stop the call in its worker
            raise
        return self._rollouts(episodes)

    async def group(self, rendered: RenderedPrompt, request: Request) -> list[Rollout]:
        """Sample one group of episodes; several groups can be sampled concurrently, each with its own call.

        Groups must have different streams. The engine starts a batch as soon as it is free, so the
        requests that share a batch depend on timing. The limit on failed episodes applies to this group.

        Args:
            rendered: the problem with its prompt.
            request: request for the prompt; `count` is the size of the group.
        Returns:
            The rollouts, whose field `group` is 0.
        Raises:
            UserCodeError: more episodes failed than [reward_pool] max_failed allows.
        """
        if not self._lanes:
            self._continuous, self._lanes = True, lanes(self._sampler, self._sampling, eager=True)
        self._lane(0).parties(1)
        episodes = await self._group(rendered, request, 0, request.stream * request.count)
        return self._rollouts(episodes)

    async def _groups(
        self, rendered: Sequence[RenderedPrompt], requests: Sequence[Request], first: int
    ) -> list[Episode]:
        pool = self._pool
        count, eager = (1, False) if pool is None else (pool.lanes, not pool.in_step)
        self._lanes = lanes(self._sampler, self._sampling, count, eager)
        places = accumulate((request.count for request in requests), initial=0)
        groups = list(zip(range(first, first + len(requests)), rendered, requests, places, strict=False))
        for number, *_ in groups:  # register all groups first, so that no batch starts without one
            self._lane(number).parties(1)
        try:
            groups_of_episodes = await event_loop.gather(
                self._group(rendered, request, n, index) for n, rendered, request, index in groups
            )
        finally:
            for lane in self._lanes:
                lane.close()
        return [episode for members in groups_of_episodes for episode in members]

    def _rollouts(self, episodes: Sequence[Episode]) -> list[Rollout]:
        """Return the rollouts of ended episodes, if the limit on failed ones allows it."""
        if self._pool is not None:
            self._pool.check([episode.detail for episode in episodes if episode.ended in FAILED], len(episodes))
        version = max((turn.weights_version for episode in episodes for turn in episode.turns), default=0)
        return [self._rollout(episode, version) for episode in episodes]

    def _lane(self, group: int) -> Lane:
        return self._lanes[group % len(self._lanes)]

    async def _group(self, rendered: RenderedPrompt, request: Request, number: int, index: int) -> list[Episode]:
        """Run the episodes of one problem.

        Args:
            rendered: the problem with its prompt.
            request: request for the prompt.
            number: number of the group.
            index: index of its first episode among all episodes of the call.
        """
        (problem, prompt), lane = rendered, self._lane(number)
        session = next(_sessions) if self._pool is not None else None
        members = [
            Episode(prompt, problem, number, member, index + member, request.stream, request.max_tokens, session)
            for member in range(request.count)
        ]
        if self._pool is not None:
            await self._reset(members, self._pool)
        live = [episode for episode in members if not episode.over]
        shared: list[Completion] = []
        if len({episode.context for episode in live}) == 1:
            # Sample for failed members, too: the draws of the others depend on the request's count.
            whole = Request(live[0].context, request.count, self._budget(live[0]), request.stream, session)
            shared = await lane.generate(whole, (index, 0))
        lane.parties(len(live) - 1)  # the batch now waits for each live episode instead of for the group
        await event_loop.gather(
            self._episode(episode, lane, shared[episode.member] if shared else None) for episode in live
        )
        for episode in members:
            if episode.env is not None:
                await episode.env.close()
        return members

    async def _reset(self, members: Sequence[Episode], pool: EnvPool) -> None:
        """Reset the environment of each episode, with one seed for the whole group.

        The environment may add messages to the prompt.
        """
        # Continuous sampling uses the same seed for the whole run. The stream gives a repeated problem another
        # environment.
        streams = (members[0].stream,) if self._continuous else ()
        seed = derive_seed(self._sampling.seed, "environment", members[0].problem.id, *streams)

        async def reset(episode: Episode) -> Answer:
            episode.env = pool.env(episode.problem.environment, episode.group)
            return await episode.env.reset(episode.problem.facts, seed)

        answers = await event_loop.gather(map(reset, members))
        for episode, answer in zip(members, answers, strict=True):
            self._take(episode, answer)

    async def _episode(self, episode: Episode, lane: Lane, completion: Completion | None) -> None:
        """Run an episode to its end.

        Args:
            episode: the episode.
            lane: lane that collects the requests of episodes into batches.
            completion: the first turn, if the group's shared request sampled it; otherwise None.
        """
        while not episode.over:
            if completion is None:
                stream = turn_stream(episode.stream, episode.member, len(episode.turns))
                request = Request(episode.context, 1, self._budget(episode), stream, episode.session)
                [completion] = await lane.generate(request, (episode.call_index, len(episode.turns)))
            episode.add_turn(completion, episode.state)
            episode.left -= len(completion.ids)
            completion = None
            await self._step(episode)
        # Not in a `finally`: after an exception all episodes end, and this call would start another batch.
        lane.parties(-1)

    async def _step(self, episode: Episode) -> None:
        if episode.env is None:
            episode.over = True
            return
        turn = episode.turns[-1]
        action = self._chat.decode(episode.ids[turn.start : turn.end])
        self._take(episode, await episode.env.step(action, turn.finish_reason, len(episode.turns) - 1, episode.left))

    def _budget(self, episode: Episode) -> int:
        """Return the number of tokens that the next turn may sample."""
        return (
            episode.left
            if self._pool is None
            else int(min(self._limits.turn_tokens, episode.left, self._context_left(episode)))
        )

    def _context_left(self, episode: Episode) -> float:
        """Return the number of tokens that still fit into the model's context."""
        assert self._pool is not None
        limit = min(self._pool.context, self._sampler.max_model_len)
        return limit - len(episode.prompt.ids) - len(episode.ids)

    def _take(self, episode: Episode, answer: Answer) -> None:
        """Apply the environment's answer to an episode; messages that do not render end it."""
        try:
            self._apply(episode, answer)
        except DataError as error:  # the chat template cannot render the messages
            episode.finish("error", str(error))

    def _apply(self, episode: Episode, answer: Answer) -> None:
        if answer.kind in FAILED:
            episode.finish(answer.kind, f"{answer.detail}\n{answer.trace}")
            return
        for name, value in answer.metrics.items():
            episode.count(name, value)
        if episode.turns:
            # The answer to a reset precedes all turns, and rewards none.
            episode.turns[-1] = replace(episode.turns[-1], reward=answer.reward)
        if answer.kind == "end":
            episode.finish("done")
            episode.parts = None if answer.parts is None else dict(answer.parts)
            if not is_reward(sum((*(episode.parts or {}).values(), *(turn.reward for turn in episode.turns)))):
                episode.finish("error", "OverflowError: the sum of the rewards is not between -1e15 and 1e15")
        elif len(episode.turns) >= self._limits.max_turns or episode.left <= 0:
            episode.finish("turns" if len(episode.turns) >= self._limits.max_turns else "tokens")
        else:
            self._observe(episode, answer)

    def _observe(self, episode: Episode, answer: Answer) -> None:
        """Append the observation; end the episode if no token would be left for a reply."""
        new: list[int] = []
        if episode.turns:
            messages = self._stitcher.short(answer.messages, self._limits.observation_tokens)
            new = self._stitcher.of(episode.problem).ids(messages, episode.end)
        elif answer.messages or answer.tools_text:
            opening = answer.messages, answer.tools, answer.tools_text
            episode.prompt = self._stitcher.of(episode.problem).opening(episode.problem.prompt, *opening)
        if self._context_left(episode) - len(new) < 1:
            episode.finish("context")
            return
        episode.state = answer.state or ("" if episode.turns else _OPENING)
        episode.observe(new)
        episode.count("observation_tokens", len(new))

    def _rollout(self, episode: Episode, version: int) -> Rollout:
        """Return the episode as a rollout, with its reward unless [[rewards]] score it.

        An episode that a limit ended has reward 0 if the environment gives rewards itself.
        """
        parts = episode.parts
        limited = episode.ended in ("turns", "tokens", "context")
        if limited and self._pool is not None and self._pool.traits[episode.problem.environment]["rewards"]:
            parts = {"env": 0.0}
        # An episode that failed at its reset has no turn, and a rollout has at least one.
        turns = tuple(episode.turns) or (Turn(0, 0, "stop", version),)
        rollout = self._chat.rollout(
            (episode.problem, episode.prompt), episode.group, episode.ids, episode.logprobs, turns
        )
        status = episode.ended if episode.ended in FAILED else "ok"
        rollout = replace(rollout, status=status, ended=episode.ended, metrics=episode.metrics)
        return rollout if parts is None or episode.ended in FAILED else rollout.rewarded(sum(parts.values()), parts)
