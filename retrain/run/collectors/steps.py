"""The collector of `[rollout] mode = "steps"`: whole batches, sampled step by step or some steps ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from retrain.run.collectors.collector import PhaseTimer, sampling_thread, with_own_tokenizer
from retrain.run.collectors.rounds import Collection, collect
from retrain.run.run_context import RunContext
from retrain.system.event_loop import StopFlag, wait_for
from retrain.types import Batch, Metrics, State

_AHEAD = "ahead"
"""Key of the checkpoint that holds the batches collected for later steps."""


class StepCollector:
    """Collects the batches of consecutive steps, with `[rollout] overlap` in a thread.

    Version v of the weights is the one after v steps. Step t turns version t into version t + 1.
    Without overlap, the batch of step t is sampled with version t. With `overlap = k`:

    - `begin` starts a thread that samples and scores the batch of step t + k with version t, while
      the trainer works on step t.
    - `sync` waits for the thread, and then gives version t + 1 to the sampler.
    - Every batch is therefore k versions old. The exception is the first k batches of a run, which
      are all sampled before its first step.
    - The thread is idle between `sync` and `begin`, when evaluations run and checkpoints are saved.
      Its results do not depend on timing.

    The thread has its own tokenizer and never reads the policy's weights. It shares sampler, task,
    reward pool and expert rows with the trainer, which does not use them while the thread works.

    Args:
        cursor: index of the task's next unused problem.
        saved: a checkpoint, which may hold batches collected ahead.
    """

    def __init__(self, context: RunContext, cursor: int, saved: State | None) -> None:
        self._context = context
        self._sampling = context
        """The context of the thread that samples."""
        self._cursor = cursor
        self._ahead: deque[Collection] = deque()
        self._coming: Future[list[Collection]] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._interrupt = StopFlag()
        # A run that is resumed without overlap samples the batches of later steps again.
        if context.config.rollout.overlap:
            self._sampling = with_own_tokenizer(context)
            waiting = (saved or {}).get(_AHEAD, ())
            self._ahead.extend(Collection.restored(context.layout, state) for state in waiting)
            self._thread = sampling_thread(self._interrupt)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        """Interrupt the thread and wait for it: the reward pool must not close while it is used."""
        self._interrupt.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int, timer: PhaseTimer) -> Collection:
        """Return the batch of a step, collecting it now if it was not collected ahead."""
        # At the start of a run nothing is ahead.
        if not self._ahead:
            self.begin(step, timer)
            self._wait(timer)
        collection = self._ahead.popleft() if self._ahead else self._collect(step, self._cursor, timer)
        self._cursor = collection.cursor
        return collection

    def begin(self, step: int, timer: PhaseTimer) -> None:
        """Start collecting the missing batches from this step on in the thread, if there is one."""
        # No step after the last one is sampled for.
        end = min(step + self._context.config.rollout.overlap, self._context.config.training.max_steps)
        missing = range(step + len(self._ahead), end)
        if self._thread is not None and missing:
            # The batches that wait have drawn their problems already.
            cursor = self._ahead[-1].cursor if self._ahead else self._cursor
            self._coming = self._thread.submit(self._collect_all, missing, cursor, timer)

    def sync(self, version: int, timer: PhaseTimer, batch: Batch | None) -> Metrics:
        """Wait for the thread, pass the trained batch to the row sources, and sync the sampler's weights."""
        self._wait(timer)
        metrics = self._context.after_update(batch)
        with timer("sync"):
            self._context.sync(version)
        return metrics

    def drain(self) -> str:
        """Do nothing: between two steps nothing is in flight."""
        return ""

    def state_dict(self, done: int) -> State:
        """Return the run's state after `done` steps, with the batches collected ahead."""
        waiting = {_AHEAD: [collection.state_dict() for collection in self._ahead]} if self._ahead else {}
        return self._context.state_dict(done, self._cursor) | waiting

    def _wait(self, timer: PhaseTimer) -> None:
        if self._coming is not None:
            # Forgotten first, so that the next call does not raise an error of the thread again.
            coming = self._coming
            self._coming = None
            with timer("wait"):
                self._ahead.extend(wait_for(coming))

    def _collect_all(self, steps: Sequence[int], cursor: int, timer: PhaseTimer) -> list[Collection]:
        collections: list[Collection] = []
        for step in steps:
            collections.append(self._collect(step, cursor, timer))
            cursor = collections[-1].cursor
        return collections

    def _collect(self, step: int, cursor: int, timer: PhaseTimer) -> Collection:
        with timer("rollout"), self._context.ranks.rollouts.during(f"the rollouts of step {step}"):
            collection = collect(self._sampling, step, cursor)
        timer.tokens += collection.metrics["tokens/sampled"]
        return collection
