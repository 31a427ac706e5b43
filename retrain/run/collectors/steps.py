"""The collector of `[rollout] mode = "steps"`: whole batches, sampled step by step or some steps ahead."""

from __future__ import annotations

import copy
import time
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from retrain.run.collectors.rounds import Collection, collect
from retrain.run.run_context import RunContext
from retrain.run.stop_signal import Stop
from retrain.system.event_loop import StopFlag, wait_for
from retrain.types import Batch, Metrics, State

_AHEAD = "ahead"
"""Key of the checkpoint that holds the batches collected for later steps."""


class PhaseTimer:
    """Measures the wall time of each phase of a step.

    Two threads may time phases of different names at once.

    Attributes:
        began: time at which the step began, in seconds of `time.perf_counter`.
        spent: seconds of each phase.
        tokens: number of tokens sampled in the phase "rollout".
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.spent: dict[str, float] = {}
        self.tokens = 0.0

    @contextmanager
    def __call__(self, phase: str) -> Generator[None]:
        began = time.perf_counter()
        yield
        self.spent[phase] = self.spent.get(phase, 0.0) + time.perf_counter() - began

    def metrics(self) -> Metrics:
        """Return time/PHASE_s and time/step_s in seconds, and time/tokens_per_s of the rollout.

        If a thread sampled, time/overlap_s is the part of its time during which the loop did not
        wait for it.
        """
        metrics = {f"time/{phase}_s": seconds for phase, seconds in self.spent.items()}
        if "rollout" in self.spent:
            rollout = self.spent["rollout"]
            metrics["time/tokens_per_s"] = self.tokens / max(rollout, 1e-9)
            if "wait" in self.spent:
                metrics["time/overlap_s"] = max(0.0, rollout - self.spent["wait"])
        return metrics | {"time/step_s": time.perf_counter() - self.began}


class Collector:
    """Collects the batches of consecutive steps, with `[rollout] overlap` in a thread.

    It is a context manager; its end waits for the thread.

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
        stop: requested by a signal.
    """

    def __init__(self, context: RunContext, cursor: int, saved: State | None, stop: Stop) -> None:
        self.cursor = cursor
        self._context, self._mine = context, context
        self._ahead: deque[Collection] = deque()
        self._coming: Future[list[Collection]] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._interrupt, self._stop = StopFlag(), stop
        if context.config.rollout.overlap:
            self._mine = self._with_own_tokenizer()
            waiting = (saved or {}).get(_AHEAD, ())
            self._ahead.extend(Collection.restored(context.layout, one) for one in waiting)
            self._thread = self._new_thread()

    def _with_own_tokenizer(self) -> RunContext:
        """Return the context for another thread."""
        chat = self._context.chat
        return replace(self._context, chat=replace(chat, tokenizer=copy.deepcopy(chat.tokenizer)))

    def _new_thread(self) -> ThreadPoolExecutor:
        # OpenMP's thread count is set per thread, and the order of sums depends on it.
        return ThreadPoolExecutor(1, "sampling", _prepare, (torch.get_num_threads(), self._interrupt))

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        """Interrupt the thread and wait for it: the reward pool must not close while it is used."""
        self._interrupt.set()
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int, timer: PhaseTimer) -> Collection:
        """Return the batch of a step, collecting it now if it was not collected ahead."""
        if not self._ahead:
            self.begin(step, timer)
            self._wait(timer)
        collection = self._ahead.popleft() if self._ahead else self._collect(step, self.cursor, timer)
        self.cursor = collection.cursor
        return collection

    def begin(self, step: int, timer: PhaseTimer) -> None:
        """Start collecting the missing batches from this step on in the thread, if there is one."""
        end = min(step + self._context.config.rollout.overlap, self._context.config.training.max_steps)
        missing = range(step + len(self._ahead), end)
        if self._thread is not None and missing:
            cursor = self._ahead[-1].cursor if self._ahead else self.cursor
            self._coming = self._thread.submit(self._collect_all, missing, cursor, timer)

    def sync(self, version: int, timer: PhaseTimer, batch: Batch | None) -> Metrics:
        """Wait for the thread, pass the trained batch to the row sources, and sync the sampler's weights.

        Returns:
            Metrics of the row sources.
        Raises:
            RetrainError: the error that the thread raised.
        """
        self._wait(timer)
        metrics: Metrics = {}
        if batch is not None:
            for source in self._context.row_sources.values():
                metrics |= self._context.ranks.on_rank0(partial(source.after, batch))
        with timer("sync"):
            self._context.sync(version)
        return metrics

    def drain(self) -> str:
        """Complete what is in flight, because the run is asked to stop; return what it left, as the end of a sentence.

        Between two steps nothing is in flight.
        """
        return ""

    def state_dict(self, done: int) -> State:
        """Return the run's state after `done` steps, with the batches collected ahead."""
        waiting = {_AHEAD: [one.state_dict() for one in self._ahead]} if self._ahead else {}
        return self._context.state_dict(done, self.cursor) | waiting

    def _wait(self, timer: PhaseTimer) -> None:
        if self._coming is not None:
            coming, self._coming = self._coming, None
            with timer("wait"):
                self._ahead.extend(wait_for(coming))

    def _collect_all(self, steps: Sequence[int], cursor: int, timer: PhaseTimer) -> list[Collection]:
        found: list[Collection] = []
        for step in steps:
            found.append(self._collect(step, cursor, timer))
            cursor = found[-1].cursor
        return found

    def _collect(self, step: int, cursor: int, timer: PhaseTimer) -> Collection:
        with timer("rollout"), self._context.ranks.rollouts.during(f"the rollouts of step {step}"):
            collection = collect(self._mine, step, cursor)
        timer.tokens += collection.metrics["tokens/sampled"]
        return collection


def _prepare(threads: int, stop: StopFlag) -> None:
    """Initialize the sampling thread."""
    torch.set_num_threads(threads)
    stop.adopt()
