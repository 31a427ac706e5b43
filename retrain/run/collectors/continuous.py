"""Continuous sampling: groups are sampled during updates, too, and a step trains on the first complete groups."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from retrain.errors import EngineError
from retrain.functional.seeds import derive_seed
from retrain.run.collectors.rollouts import greedy_sampling, next_problems, score, train_sampling, with_greedy
from retrain.run.collectors.rounds import Collection, collect
from retrain.run.collectors.steps import Collector, PhaseTimer
from retrain.run.episodes import EpisodeRunner
from retrain.run.run_context import RunContext
from retrain.run.stop_signal import Stop
from retrain.system import event_loop
from retrain.training.chat import RenderedPrompt
from retrain.types import Batch, Metrics, Problem, Request, Rollout, State

_GROUPS = "groups"
"""Key, in a checkpoint, of the groups on which no step has trained."""
_POLL_S = 0.2
"""Seconds between two checks of the stop signal while the trainer waits for groups."""
_SCORING_THREADS = 16
"""Largest number of groups that are scored at the same time."""


@dataclass(eq=False)
class PendingGroup:
    """A group that no step has trained on yet.

    Attributes:
        number: index among all groups of the run; selects its random numbers.
        index: index of its problem in the task.
        rendered: the rendered problem.
        rollouts: its scored rollouts, with group number 0; empty until it is complete.
    """

    number: int
    index: int
    rendered: RenderedPrompt
    rollouts: list[Rollout]

    def state_dict(self) -> State:
        """Return the state for a checkpoint; an incomplete group is stored without rollouts."""
        return {
            "index": self.index,
            "problem": asdict(self.rendered[0]),
            "rollouts": [one.row() for one in self.rollouts],
        }


class ContinuousCollector(Collector):
    """Samples groups without pause. The trainer takes complete groups in the order of their completion.

    - The trainer's thread draws problems when it waits for a step, begins an update or has loaded weights. It draws as
      many as `max_staleness` allows. With n pending groups and P groups per step, the next group is expected to be
      trained on n / P steps from now. It is drawn if this is at most `max_staleness` steps after the step of the
      sampler's weights. A slow group, which later groups overtake, can exceed this bound; it is still trained on.
    - A coroutine per group samples it, at most `in_flight` at a time, and a thread scores it.
    - New weights reach the engine while it samples: vLLM servers between two tokens, other engines between two batches.
    - A checkpoint holds the complete groups as rows and the others as problems, which a resumed run samples again.

    Args:
        stop: requested by a signal; then `take` and `drain` wait at most `[rollout] drain_timeout_s`.
    """

    def __init__(self, context: RunContext, cursor: int, saved: State | None, stop: Stop) -> None:
        super().__init__(context, cursor, saved, stop)
        text = "continuous rollouts depend on timing: the run cannot be repeated bit for bit"
        context.observe("message", {"text": text, "level": "info"})
        self._settings = context.config.rollout
        self._mine = self._with_own_tokenizer()
        self._numbers, self._version, self._next, self._too_long = 0, 0, 0, 0
        self._pending: dict[int, PendingGroup] = {}
        self._draining = False
        self._waiting: deque[PendingGroup] = deque()
        self._complete: deque[PendingGroup] = deque()
        self._flying: set[asyncio.Task[None]] = set()
        self._changed = threading.Condition()
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sampling: Future[None] | None = None
        self._thread = self._new_thread()
        self._scoring = ThreadPoolExecutor(_SCORING_THREADS, "scoring", self._interrupt.adopt)
        seed = derive_seed(context.config.training.seed, "continuous")
        sampling = train_sampling(context.config, context.trained.loaded, seed)
        self._runner = EpisodeRunner(context.sampler, self._mine.chat, sampling, context.env_pool)
        self._greedy: EpisodeRunner | None = None
        if "greedy_rewards" in context.trained.pipeline.reads:
            self._greedy = EpisodeRunner(context.sampler, self._mine.chat, greedy_sampling(context), context.env_pool)
        self._restore((saved or {}).get(_GROUPS, {}))
        self._last = time.perf_counter()

    def __exit__(self, *details: object) -> None:
        """Interrupt sampling and scoring."""
        super().__exit__(*details)
        self._scoring.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int, timer: PhaseTimer) -> Collection:
        """Return the batch of a step, of the first groups that are complete.

        Raises:
            EngineError: the run is asked to stop, and no batch is complete within `drain_timeout_s`.
            RetrainError: the error that ended the sampling.
        """
        collection = collect(self._context, step, self.cursor, partial(self._groups, step, timer))
        now = time.perf_counter()
        timer.spent["rollout"], self._last = now - self._last, now
        timer.tokens += collection.metrics["tokens/sampled"]
        with self._changed:  # a group is complete a moment before its task ends, so tasks are not counted
            queued = len(self._complete)
            flying = len(self._pending) - queued - len(self._waiting)
        metrics = {
            **collection.metrics,
            **staleness(step, collection.rollouts),
            "rollout/too_long": float(self._too_long),
            "rollout/in_flight": float(flying),
            "rollout/queued": float(queued),
        }
        self._too_long = 0
        batch = collection.batch
        if batch is not None:
            own = [collection.rollouts[index] for index in collection.kept]
            batch = batch.replace(token_staleness=_token_staleness(step, own, batch))
        return replace(collection, metrics=metrics, batch=batch)

    def begin(self, step: int, timer: PhaseTimer) -> None:
        """Draw the problems whose sampling may begin while the trainer works on the step before `step`."""
        self._next = step
        self._draw()

    def sync(self, version: int, timer: PhaseTimer, batch: Batch | None) -> Metrics:
        metrics = super().sync(version, timer, batch)
        self._version = version
        self._draw()
        return metrics

    def drain(self) -> str:
        """Begin no more groups, and wait for those in flight for at most `drain_timeout_s`.

        Returns:
            The end of a sentence about the groups that a checkpoint keeps.
        """
        self._draining = True
        until = time.monotonic() + self._settings.drain_timeout_s
        with self._changed:
            while self._flying and self._error() is None and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(_POLL_S, left))
            complete, others = len(self._complete), len(self._pending) - len(self._complete)
        return f"; it trains on {complete} complete groups first, and samples {others} that are incomplete again"

    def state_dict(self, done: int) -> State:
        with self._changed:
            groups = [one.state_dict() for one in self._complete]
            groups += [one.state_dict() for one in self._pending.values() if not one.rollouts]
            first = min((one.index for one in self._pending.values()), default=self.cursor)
        # A run that goes on in mode "steps" ignores the groups, and samples their problems again from the first one.
        state = {"begun": self._numbers, "cursor": self.cursor, "pending": groups}
        return self._context.state_dict(done, first) | {_GROUPS: state}

    def _restore(self, saved: State) -> None:
        """Restore the groups of a checkpoint: complete ones wait for the next step, the others are sampled again.

        A checkpoint holds the problems, because a curriculum may have another one at the same index by now.
        """
        self._numbers, self.cursor = int(saved.get("begun", 0)), int(saved.get("cursor", self.cursor))
        for state in saved.get("pending", ()):
            problem = Problem(**state["problem"])
            group = self._add(int(state["index"]), (problem, self._context.chat.prompt(problem.prompt)))
            if state["rollouts"]:
                group.rollouts = [Rollout.of_row(row) for row in state["rollouts"]]
                self._complete.append(group)
            else:
                self._waiting.append(group)

    def _draw(self) -> None:
        """Draw as many problems as `max_staleness` and the end of the run allow, and start their sampling."""
        if self._stop.requested:
            return
        steps, prompts = self._context.config.training.max_steps, self._context.prompts
        while True:
            expected = self._next + len(self._pending) // prompts
            if expected > self._version + self._settings.max_staleness or expected >= steps:
                break
            [rendered], after = next_problems(self._context, self.cursor, 1)
            self._too_long += after - self.cursor - 1
            self._waiting.append(self._add(after - 1, rendered))
            self.cursor = after
        if self._sampling is None:
            assert self._thread is not None
            self._sampling = self._thread.submit(event_loop.run, self._sample_all())
            self._sampling.add_done_callback(self._notify)
        elif self._loop is not None and self._wake is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    def _add(self, index: int, rendered: RenderedPrompt) -> PendingGroup:
        group = self._pending[self._numbers] = PendingGroup(self._numbers, index, rendered, [])
        self._numbers += 1
        return group

    def _groups(
        self, step: int, timer: PhaseTimer, cursor: int, prompts: int, seed: int, first: int
    ) -> tuple[list[Rollout], dict[int, RenderedPrompt], int]:
        """Wait for `prompts` complete groups, and return them as `sampled` in `collect` does, numbered from `first`."""
        self._next = self._version = step
        self._draw()
        until = None
        with timer("wait"), self._changed:
            while len(self._complete) < prompts:
                if (error := self._error()) is not None:
                    raise error
                if self._stop.requested:
                    until = until or time.monotonic() + self._settings.drain_timeout_s
                    if time.monotonic() > until or len(self._complete) == len(self._pending):
                        ready, begun = len(self._complete), len(self._pending)
                        left = f"{begun - ready} incomplete groups are abandoned, and sampled again"
                        raise EngineError(f"step {step} has {ready} of {prompts} groups; {left}")
                self._changed.wait(_POLL_S)
            groups = [self._complete.popleft() for _ in range(prompts)]
            for group in groups:
                del self._pending[group.number]
        numbered = list(enumerate(groups, first))
        rollouts = [replace(one, group=number) for number, group in numbered for one in group.rollouts]
        return rollouts, {number: group.rendered for number, group in numbered}, self.cursor

    def _error(self) -> BaseException | None:
        """Return the error that ended the sampling; None while sampling continues."""
        if self._sampling is None or not self._sampling.done():
            return None
        return self._sampling.exception() or EngineError("sampling has ended")

    def _notify(self, _: object = None) -> None:
        with self._changed:
            self._changed.notify_all()

    async def _sample_all(self) -> None:
        """Sample groups in the event loop until cancelled."""
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        most = self._settings.in_flight or float("inf")
        async with asyncio.TaskGroup() as tasks:
            while True:
                while self._waiting and len(self._flying) < most and not self._draining:
                    task = tasks.create_task(self._sample(self._waiting.popleft()))
                    self._flying.add(task)
                    task.add_done_callback(self._landed)
                await self._wake.wait()
                self._wake.clear()

    def _landed(self, task: asyncio.Task[None]) -> None:
        self._flying.discard(task)
        if self._wake is not None:
            self._wake.set()
        self._notify()

    async def _sample(self, group: PendingGroup) -> None:
        """Sample and score a group."""
        rollouts = await self._scored(self._runner, group, self._context.config.training.group_size)
        if self._greedy is not None:
            rollouts = with_greedy(rollouts, await self._scored(self._greedy, group, 1))
        with self._changed:
            group.rollouts = rollouts
            self._complete.append(group)

    async def _scored(self, runner: EpisodeRunner, group: PendingGroup, count: int) -> list[Rollout]:
        most = self._context.config.training.max_tokens
        request = Request(group.rendered[1].ids, count, most, group.number)
        rollouts = await runner.group(group.rendered, request)
        scoring = partial(score, self._mine.chat, self._context.pool, [group.rendered], rollouts, most)
        return await asyncio.get_running_loop().run_in_executor(self._scoring, scoring)


def staleness(step: int, rollouts: list[Rollout]) -> Metrics:
    """Return the age, in steps, of the weights that sampled the tokens of a step.

    rollout/staleness_min, _mean and _max are taken over tokens. rollout/staleness_mixed is the share of completions
    whose tokens were sampled with several versions of the weights. rollout/staleness is the mean over completions of
    the age of their oldest token.
    """
    ages = [[step - version for turn in one.turns for version in turn.token_versions] for one in rollouts]
    oldest = [max(some) for some in ages if some] or [0]
    every = [age for some in ages for age in some] or [0]
    return {
        "rollout/staleness": sum(oldest) / len(oldest),
        "rollout/staleness_min": float(min(every)),
        "rollout/staleness_mean": sum(every) / len(every),
        "rollout/staleness_max": float(max(every)),
        "rollout/staleness_mixed": sum(len({*some}) > 1 for some in ages) / len(ages),
    }


def _token_staleness(step: int, rollouts: list[Rollout], batch: Batch) -> Any:
    """Return the staleness [N, T] int64 of the tokens of the batch's first rows; -1 elsewhere."""
    ages = torch.full(batch.input_ids.shape, -1)
    for row, rollout in enumerate(rollouts):
        for turn, (start, end) in zip(rollout.turns, rollout.spans, strict=True):
            ages[row, start:end] = step - torch.tensor(turn.token_versions)
    return ages.to(batch.input_ids.device)
