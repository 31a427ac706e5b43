"""Continuous sampling: groups are sampled during updates, too, and a step trains on the first complete groups."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Self

import torch

from retrain.errors import EngineError
from retrain.functional.seeds import derive_seed
from retrain.run.collectors.collector import PhaseTimer, sampling_thread, with_own_tokenizer
from retrain.run.collectors.rollouts import greedy_sampling, next_problems, score, train_sampling, with_greedy
from retrain.run.collectors.rounds import Collection, collect
from retrain.run.episodes import EpisodeRunner
from retrain.run.run_context import RunContext
from retrain.run.stop_signal import Stop
from retrain.system import event_loop
from retrain.system.event_loop import StopFlag
from retrain.training.chat import RenderedPrompt
from retrain.types import Batch, Metrics, Problem, Request, Rollout, State

_GROUPS = "groups"
"""Key, in a checkpoint, of the groups on which no step has trained."""
_POLL_S = 0.2
"""Seconds between two checks of the stop signal while the trainer waits for groups."""
_DRAIN_S = 20.0
"""Seconds to wait after SIGTERM for groups in flight. SLURM and Kubernetes kill 30 s after SIGTERM, and the checkpoint
must be written before."""
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
            "rollouts": [rollout.row() for rollout in self.rollouts],
        }


class ContinuousCollector:
    """Samples groups without pause. The trainer takes complete groups in the order of their completion.

    - The trainer's thread draws problems when it waits for a step, begins an update or has loaded weights. It draws as
      many as `max_staleness` allows. With n pending groups and P groups per step, the next group is expected to be
      trained on n / P steps from now. It is drawn if this is at most `max_staleness` steps after the step of the
      sampler's weights. A slow group, which later groups overtake, can exceed this bound; it is still trained on.
    - A coroutine per group samples it, at most `in_flight` at a time, and a thread scores it.
    - New weights reach the engine while it samples: vLLM servers between two tokens, other engines between two batches.
    - A checkpoint holds the complete groups as rows and the others as problems, which a resumed run samples again.

    Args:
        stop: requested by a signal; then `take` and `drain` wait at most 20 s.
    """

    def __init__(self, context: RunContext, cursor: int, saved: State | None, stop: Stop) -> None:
        text = "continuous rollouts depend on timing: the run cannot be repeated bit for bit"
        context.observe("message", {"text": text, "level": "info"})
        self._context = context
        self._settings = context.config.rollout
        self._sampling = with_own_tokenizer(context)
        self._cursor = cursor
        self._begun = 0
        """Number of groups so far; the next group gets it as its number."""
        self._version = 0
        """Version of the sampler's weights."""
        self._next = 0
        """The next step that takes groups."""
        self._too_long = 0
        """Problems that were skipped since the last step, because their prompts are too long."""
        self._stop = stop
        self._interrupt = StopFlag()
        self._pending: dict[int, PendingGroup] = {}
        self._draining = False
        self._waiting: deque[PendingGroup] = deque()
        self._complete: deque[PendingGroup] = deque()
        self._flying: set[asyncio.Task[None]] = set()
        self._changed = threading.Condition()
        self._wake: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sampled: Future[None] | None = None
        """The end of the sampling; None before the first group."""
        self._thread = sampling_thread(self._interrupt)
        self._scoring = ThreadPoolExecutor(_SCORING_THREADS, "scoring", self._interrupt.adopt)
        seed = derive_seed(context.config.training.seed, "continuous")
        sampling = train_sampling(context.config, context.trained.loaded, seed)
        self._runner = EpisodeRunner(context.sampler, self._sampling.chat, sampling, context.env_pool)
        self._greedy: EpisodeRunner | None = None
        if "greedy_rewards" in context.trained.pipeline.reads:
            self._greedy = EpisodeRunner(
                context.sampler, self._sampling.chat, greedy_sampling(context), context.env_pool
            )
        self._restore((saved or {}).get(_GROUPS, {}))
        self._last = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        """Interrupt sampling and scoring, and wait for both: the reward pool must not close while it is used."""
        self._interrupt.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._scoring.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int, timer: PhaseTimer) -> Collection:
        """Return the batch of a step, of the first groups that are complete.

        Raises:
            EngineError: the run is asked to stop, and no batch is complete within 20 s.
            RetrainError: the error that ended the sampling.
        """
        collection = collect(self._context, step, self._cursor, partial(self._groups, step, timer))
        now = time.perf_counter()
        # Sampling never pauses: the rollout of a step lasts since the previous batch was taken.
        timer.spent["rollout"] = now - self._last
        self._last = now
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
            sampled = [collection.rollouts[index] for index in collection.kept]
            batch = batch.replace(token_staleness=_token_staleness(step, sampled, batch))
        return replace(collection, metrics=metrics, batch=batch)

    def begin(self, step: int, timer: PhaseTimer) -> None:
        """Draw the problems whose sampling may begin while the trainer works on the step before `step`."""
        self._next = step
        self._draw()

    def sync(self, version: int, timer: PhaseTimer, batch: Batch | None) -> Metrics:
        """Load the new weights while the engine samples, and draw what they allow."""
        metrics = self._context.after_update(batch)
        with timer("sync"):
            self._context.sync(version)
        self._version = version
        self._draw()
        return metrics

    def drain(self) -> str:
        """Begin no more groups, and wait for those in flight for at most 20 s.

        Returns:
            The end of a sentence about the groups that a checkpoint keeps.
        """
        self._draining = True
        until = time.monotonic() + _DRAIN_S
        with self._changed:
            while self._flying and self._error() is None and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(_POLL_S, left))
            complete = len(self._complete)
            incomplete = len(self._pending) - complete
        return f"; it trains on {complete} complete groups first, and samples {incomplete} that are incomplete again"

    def state_dict(self, done: int) -> State:
        """Return the run's state after `done` steps, with the groups that no step has trained on."""
        with self._changed:
            # Complete groups first, in their order, in which a resumed run trains on them.
            groups = [group.state_dict() for group in self._complete]
            groups += [group.state_dict() for group in self._pending.values() if not group.rollouts]
            first = min((group.index for group in self._pending.values()), default=self._cursor)
        # A run that goes on in mode "steps" ignores the groups, and samples their problems again from the first one.
        state = {"begun": self._begun, "cursor": self._cursor, "pending": groups}
        return self._context.state_dict(done, first) | {_GROUPS: state}

    def _restore(self, saved: State) -> None:
        """Restore the groups of a checkpoint: complete ones wait for the next step, the others are sampled again.

        A checkpoint holds the problems, because a curriculum may have another one at the same index by now.
        """
        self._begun = int(saved.get("begun", 0))
        self._cursor = int(saved.get("cursor", self._cursor))
        for state in saved.get("pending", ()):
            problem = Problem(**state["problem"])
            group = self._add(int(state["index"]), (problem, self._context.chat.prompt_of(problem)))
            if state["rollouts"]:
                group.rollouts = [Rollout.of_row(row) for row in state["rollouts"]]
                self._complete.append(group)
            else:
                self._waiting.append(group)

    def _draw(self) -> None:
        """Draw as many problems as `max_staleness` and the end of the run allow, and start their sampling."""
        if self._stop.requested:
            return
        steps = self._context.config.training.max_steps
        prompts = self._context.prompts
        while True:
            expected = self._next + len(self._pending) // prompts
            # No step after the last one would train on the group.
            if expected > self._version + self._settings.max_staleness or expected >= steps:
                break
            [rendered], after = next_problems(self._context, self._cursor, 1)
            # Without a prompt that is too long, the cursor moves by 1.
            self._too_long += after - self._cursor - 1
            self._waiting.append(self._add(after - 1, rendered))
            self._cursor = after
        if self._sampled is None:
            self._sampled = self._thread.submit(event_loop.run, self._sample_all())
            self._sampled.add_done_callback(self._notify)
        elif self._loop is not None and self._wake is not None:
            # An asyncio.Event may only be set in the thread of its loop.
            self._loop.call_soon_threadsafe(self._wake.set)

    def _add(self, index: int, rendered: RenderedPrompt) -> PendingGroup:
        group = PendingGroup(self._begun, index, rendered, [])
        self._pending[group.number] = group
        self._begun += 1
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
                    until = until or time.monotonic() + _DRAIN_S
                    # If all groups are complete, waiting brings no more: after the stop none is begun.
                    if time.monotonic() > until or len(self._complete) == len(self._pending):
                        ready = len(self._complete)
                        left = f"{len(self._pending) - ready} incomplete groups are abandoned, and sampled again"
                        raise EngineError(f"step {step} has {ready} of {prompts} groups; {left}")
                # With a timeout, because a signal does not notify the condition.
                self._changed.wait(_POLL_S)
            groups = [self._complete.popleft() for _ in range(prompts)]
            for group in groups:
                del self._pending[group.number]
        numbered = list(enumerate(groups, first))
        rollouts = [replace(rollout, group=number) for number, group in numbered for rollout in group.rollouts]
        return rollouts, {number: group.rendered for number, group in numbered}, self._cursor

    def _error(self) -> BaseException | None:
        """Return the error that ended the sampling; None while sampling continues."""
        if self._sampled is None or not self._sampled.done():
            return None
        return self._sampled.exception() or EngineError("sampling has ended")

    def _notify(self, _: object = None) -> None:
        with self._changed:
            self._changed.notify_all()

    async def _sample_all(self) -> None:
        """Sample groups in the event loop until cancelled."""
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        most = self._settings.in_flight or float("inf")
        # An error in one group cancels the others, and so ends the sampling.
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
        scoring = partial(score, self._sampling.chat, self._context.pool, [group.rendered], rollouts, most)
        return await asyncio.get_running_loop().run_in_executor(self._scoring, scoring)


def staleness(step: int, rollouts: list[Rollout]) -> Metrics:
    """Return the age, in steps, of the weights that sampled the tokens of a step.

    rollout/staleness_min, _mean and _max are taken over tokens. rollout/staleness_mixed is the share of completions
    whose tokens were sampled with several versions of the weights. rollout/staleness is the mean over completions of
    the age of their oldest token.
    """
    ages = [[step - version for turn in rollout.turns for version in turn.token_versions] for rollout in rollouts]
    # A failed episode may have no token. A step whose episodes all failed reports 0.
    oldest = [max(of_rollout) for of_rollout in ages if of_rollout] or [0]
    token_ages = [age for of_rollout in ages for age in of_rollout] or [0]
    return {
        "rollout/staleness": sum(oldest) / len(oldest),
        "rollout/staleness_min": float(min(token_ages)),
        "rollout/staleness_mean": sum(token_ages) / len(token_ages),
        "rollout/staleness_max": float(max(token_ages)),
        "rollout/staleness_mixed": sum(len({*of_rollout}) > 1 for of_rollout in ages) / len(ages),
    }


def _token_staleness(step: int, rollouts: list[Rollout], batch: Batch) -> Any:
    """Return the staleness [N, T] int64 of the tokens of the batch's first rows; -1 elsewhere."""
    # -1, because 0 is the staleness of a token of the current weights.
    ages = torch.full(batch.input_ids.shape, -1)
    for row, rollout in enumerate(rollouts):
        for turn, (start, end) in zip(rollout.turns, rollout.spans, strict=True):
            ages[row, start:end] = step - torch.tensor(turn.token_versions)
    return ages.to(batch.input_ids.device)
