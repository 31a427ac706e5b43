"""The training loop."""

from __future__ import annotations

import copy
import random
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from retrain.algorithms.graph.pipeline import EpochCredit
from retrain.errors import DivergedError, EngineError, Preempted, RetrainError, StorageError
from retrain.functional.devices import peak_memory
from retrain.functional.seeds import derive_seed
from retrain.protocols import Ranks, tolerance_of
from retrain.run.collectors.collect import Collection, added, assign_credit, check_parity, collect, fresh_batch
from retrain.run.evaluate import measure
from retrain.run.run_context import RunContext
from retrain.run.stop_signal import Stop
from retrain.storage.run_files import read_rows
from retrain.system.event_loop import StopFlag
from retrain.training.cpu_kernels import unscanned_heap
from retrain.types import Batch, Metrics, Rollout, State

if TYPE_CHECKING:
    from retrain.algorithms.graph.pipeline import Pipeline
    from retrain.storage.run_directory import RunDirectory
    from retrain.training.chat import Chat

_NONFINITE = "/nonfinite"
"""Metric suffix: 1 if the update was skipped because its loss or gradient was not finite."""

_AHEAD = "ahead"
"""Key of the checkpoint that holds the batches collected for later steps."""

_MAX_NONFINITE = 3
"""Number of consecutive non-finite updates after which a run has diverged."""


@unscanned_heap()
def train(
    context: RunContext,
    stop: Stop,
    start: int = 0,
    cursor: int = 0,
    saved: State | None = None,
    make_collector: Callable[[RunContext, int, State | None, Stop], Collector] | None = None,
) -> None:
    """Train from step `start` to `[training] max_steps`, or until `stop_when` is met.

    One step: sample, score, assign credit, update, sync the sampler's weights, write a metrics row.
    With `[rollout] overlap`, sampling and scoring run that many steps ahead (see `Collector`).
    All random numbers of a step derive from the seed and the step's number, so a resumed run
    continues bit for bit.

    Args:
        stop: requested by a signal.
        start: steps already done.
        cursor: index of the task's next unused problem.
        saved: the checkpoint that the run resumes from, if any.
        make_collector: builds another collector than `Collector`.
    Raises:
        Preempted: SIGTERM arrived; a checkpoint of the last finished step has been written.
        DivergedError: loss or gradients were not finite in three consecutive updates.
        EngineError: sampler and trainer disagree, or the sampler failed. In the second case the
            state of training has been saved.
        StorageError: the run directory cannot be written. The state of training has been saved if
            that was possible.
    """
    settings, nonfinite = context.config.training, 0
    context.sync(start)
    if start == 0 or due(start, context.config.eval.every, settings.max_steps):
        evaluate_and_record(context, start)
    stop.defer(context.request_stop)
    with (make_collector or Collector)(context, cursor, saved, stop) as collector:
        for step in takewhile(lambda _: not context.directory.stopped, range(start, settings.max_steps)):
            seed_generators(derive_seed(settings.seed, "step", step))
            timer, done = PhaseTimer(), step + 1
            with _saving(context, collector, stop, start, step):
                collection = collector.take(step, timer)
            metrics, batch = update(context, collection, timer, partial(collector.begin, done, timer))
            bad = [name for name, value in metrics.items() if value and name.endswith(_NONFINITE)]
            nonfinite = nonfinite + 1 if bad else 0
            with _saving(context, collector, stop, start, done):
                try:
                    metrics |= collector.sync(done, timer, batch)
                finally:
                    record(context, collection, batch, metrics | timer.metrics())
            if nonfinite >= _MAX_NONFINITE:
                raise diverged(context, collection, batch, bad)
            context.steps = done
            if due(done, context.config.eval.every, _last(context, done)):
                with _saving(context, collector, stop, start, done):
                    evaluate_and_record(context, done, collector)
            if (stopped := _agreed(context.ranks, stop)) or due(
                done, context.config.checkpoint.every, _last(context, done)
            ):
                _checkpoint(context, collector, done, stopped)


def _checkpoint(context: RunContext, collector: Collector, done: int, stopped: str) -> None:
    """Save the state after `done` steps; raise Preempted if a signal `stopped` the run before its last step."""
    ends = stopped and done < _last(context, done)
    left = collector.drain() if ends else ""
    context.directory.save_checkpoint(done, collector.state_dict(done))
    if ends:
        raise Preempted(f"stopped by {stopped} after step {done}; --resume auto continues from there{left}")


def _last(context: RunContext, done: int) -> int:
    """Return the number of the run's last step: `done` if `stop_when` is met, otherwise max_steps."""
    settings, directory = context.config.training, context.directory
    if settings.stop_when is not None:  # a metric of time differs between ranks, so rank 0 decides
        directory.stopped = context.ranks.broadcast(directory.stopped)
    return done if directory.stopped else settings.max_steps


def _agreed(ranks: Ranks, stop: Stop) -> str:
    """Return the name of a signal that any rank has received, or "".

    All ranks agree on it, so they leave the loop after the same step. A signal that arrives later
    counts after the next step.
    """
    received = next(filter(None, ranks.all_gather(stop.requested)), "")
    if received:
        stop.requested = received
    return received


@contextmanager
def _saving(context: RunContext, collector: Collector, stop: Stop, start: int, done: int) -> Generator[None]:
    """Save the state after `done` steps if the block fails with an engine or storage error.

    The error is raised again, with a note on what was saved. If a signal has asked the run to stop,
    an engine error becomes `Preempted`: the signal may have stopped the inference servers as well.

    Args:
        start: steps done when training began; nothing is saved if `done` equals it.
    """
    try:
        yield
    except (EngineError, StorageError) as error:
        if done == start and not stop.requested:
            raise
        kind = EngineError if isinstance(error, EngineError) else StorageError
        saved = "" if done == start else f"; {_rescue(context.directory, collector, done)}"
        if stop.requested and kind is EngineError:
            raise Preempted(f"stopped by {stop.requested}: {error}{saved}") from error
        raise kind(f"{error}{saved}") from error


def _rescue(directory: RunDirectory, collector: Collector, done: int) -> str:
    """Save the state after `done` steps, and describe where a resumed run continues.

    Nothing is saved if the metrics row of the last step is missing, because a resumed run would
    never write it.
    """
    try:
        recorded = directory.ranks.on_rank0(lambda: read_rows(directory.path / "metrics.jsonl"))
    except RetrainError:
        recorded = []
    if not recorded or recorded[-1]["step"] != done - 1:
        return f"step {done} is not saved, because its metrics are not; --resume auto continues before it"
    try:
        if directory.save_checkpoint(done, collector.state_dict(done)):
            return f"a checkpoint of step {done} is written; --resume auto continues from there"
    except RetrainError as error:
        return f"step {done} could not be saved either: {error}"
    return f"step {done} could not be saved either"


def diverged(context: RunContext, collection: Collection, batch: Batch | None, bad: list[str]) -> DivergedError:
    """Store the batch of the last update, and return the error that ends a diverged run.

    Args:
        bad: metrics that report a non-finite loss or gradient.
    """
    step = collection.step
    context.directory.write_rollouts(
        step, rollout_rows(context.chat, context.pipeline, collection, batch), name="diverged"
    )
    return DivergedError(
        f"loss or gradients were not finite {_MAX_NONFINITE} times in a row, last at step {step} "
        f"({', '.join(bad)}); the batch is in {context.directory.path / 'rollouts'}; "
        "lower [optimizer] lr, or resume an earlier step"
    )


def update(
    context: RunContext, collection: Collection, timer: PhaseTimer, sampler_is_free: Callable[[], None]
) -> tuple[Metrics, Batch | None]:
    """Check parity, assign credit and update the policy.

    Without a row to train on, nothing changes and the metric update/skipped is 1.

    Args:
        sampler_is_free: called once this step no longer needs the sampler.
    Returns:
        Metrics, and the batch with its advantages; None without a row to train on.
    """
    batch = collection.batch
    metrics = parity(context, collection, timer)
    sampler_is_free()
    if batch is None:
        return {"update/skipped": 1.0} | collection.dropped, None
    with timer("credit"), context.ranks.during(f"the credit of step {collection.step}"):
        if collection.credit is None:
            batch, credit = assign_credit(context.pipeline, context.policy, batch)
            keep, counts = context.pipeline.informative(batch)
        else:  # `collect` has applied the filter already
            credit, keep, counts = collection.credit, ~batch.is_expert, Metrics()
        sampled = torch.arange(len(keep), device=keep.device) < len(collection.kept)
        share = len(batch.group_ids[keep & sampled].unique()) / context.prompts
        if context.ranks.size > 1:
            from retrain.run.distributed_wrappers import check_credit

            check_credit(context.ranks, context.pipeline, batch)
        metrics |= credit | {"groups/informative": share} | added((collection.dropped, counts))
        if idle := context.pipeline.unmarked(batch):
            context.observe("message", {"text": idle, "level": "warning"})
    with timer("update"), context.ranks.during(f"the update of step {collection.step}"):
        epochs = EpochCredit(context.pipeline, batch)
        if context.pipeline.holds_policy(collection.step):
            metrics["update/skipped"] = 1.0
        else:
            metrics |= context.policy.update(
                batch, context.objective, epochs if context.pipeline.is_epochwise else None
            )
    with timer("credit"):
        metrics |= context.pipeline.after(epochs.batch) | epochs.first
    return metrics, batch


def parity(context: RunContext, collection: Collection, timer: PhaseTimer) -> Metrics:
    """Check parity after every `[rollout] parity_every` weight syncs, from the first; 0 turns it off."""
    settings = context.config.rollout
    if not collection.kept or not settings.parity_every or collection.step % settings.parity_every:
        return {}
    sampler, trainer = context.sampler.tolerance, tolerance_of(context.policy.settings.dtype)
    with timer("parity"):
        batch = fresh_batch(context, collection) if settings.ahead else _sampled(collection)
        limit = settings.parity_tolerance or max(sampler, trainer)
        return check_parity(context.policy, batch, limit, exact=sampler < trainer)


def _sampled(collection: Collection) -> Batch:
    """Return the batch without stored rollouts and expert rows, which other weights sampled."""
    assert collection.batch is not None
    if not collection.stored:
        return collection.batch
    return collection.batch.rows(torch.arange(len(collection.kept), device=collection.batch.group_ids.device))


def record(context: RunContext, collection: Collection, batch: Batch | None, metrics: Metrics) -> None:
    """Write the step's metrics row and, when due, its rollouts; update trackers and display."""
    step = collection.step
    row = {"step": step} | collection.metrics | metrics
    context.directory.append("metrics.jsonl", row)
    settings = context.config.logging
    if settings.rollouts_every and step % settings.rollouts_every == 0:
        context.directory.write_rollouts(step, rollout_rows(context.chat, context.pipeline, collection, batch))
        if settings.completions:
            shown = shown_rows(collection.rollouts[: settings.completions])
            for tracker in context.trackers:
                tracker.completions(step, shown)
    for tracker in context.trackers:
        tracker.log(step, collection.metrics | metrics)
    shown = {"max_steps": context.config.training.max_steps, "memory_mb": peak_memory(context.policy.device) / 1e6}
    context.observe("step", row | shown)
    context.observe("sample", shown_rows(collection.rollouts[:1])[0])


def shown_rows(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Return rows of completions for a tracker. All rows have the same columns."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.parts)
    return [
        {"prompt": one.prompt, "text": one.text, "answer": one.answer, "reward": one.reward}
        | {f"reward/{name}": one.parts.get(name) for name in names}
        for one in rollouts
    ]


def rollout_rows(
    chat: Chat, pipeline: Pipeline, collection: Collection, batch: Batch | None
) -> Iterator[dict[str, Any]]:
    """Yield every rollout as a JSON row with its tokens.

    Rows that were trained on also have one advantage and the stored signals per token.
    """
    rows = {index: row for row, index in enumerate(collection.kept)} if batch is not None else {}
    for index, rollout in enumerate(collection.rollouts):
        tokens = chat.pieces(rollout.completion_ids)
        credit: dict[str, Any] = {}
        if batch is not None and index in rows:
            span = slice(len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.completion_ids))
            credit["advantages"] = batch.advantages[rows[index], span].tolist()
            for column, name in pipeline.stored.items():
                credit[name] = batch.extra[column][rows[index], span].int().tolist()
        yield rollout.row() | {"tokens": tokens} | credit


def evaluate_and_record(context: RunContext, step: int, collector: Collector | None = None) -> None:
    """Evaluate on held-out problems and write the row of eval.jsonl, unless it exists already.

    Args:
        collector: gives the state to save if the evaluation is the best so far; None saves nothing.
    """
    rows = context.ranks.on_rank0(lambda: read_rows(context.directory.path / "eval.jsonl"))
    recorded = {row["step"] for row in rows}
    if not (context.config.eval.problems or context.sets) or step in recorded:
        return
    context.observe("phase", {"name": f"evaluation after {step} steps"})
    began = time.perf_counter()
    found, completions = measure(context, step)
    row = found | {"time/evaluation_s": time.perf_counter() - began}
    if context.config.eval.store:  # before the row, which marks the evaluation as done
        for name, rows in completions.items():
            context.directory.write_evaluation(step, name, rows)
    context.directory.append("eval.jsonl", row)
    for tracker in context.trackers:
        tracker.log(step, {f"eval/{name}": value for name, value in row.items() if name != "step"})
    context.observe("eval", row)
    key = (context.config.checkpoint.best or "").removeprefix("eval/")
    if key and collector and context.directory.is_best(key, step):
        context.directory.save_checkpoint(step, collector.state_dict(step), best=True)


def due(done: int, every: int, total: int) -> bool:
    """Return True after every `every` steps and after the last; with `every` = 0 only after the last."""
    return done == total or (every > 0 and done % every == 0)


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators.

    The loop calls this at the start of every step. Plug-ins that draw from these generators are then
    reproducible, also in a resumed run, without generator states in the checkpoint.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


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
        self._stop, self._signal = StopFlag(), stop
        if context.config.rollout.overlap:
            self._mine = self._with_own_tokenizer()
            waiting: Any = (saved or {}).get(_AHEAD, ())
            # Older versions stored at most one such batch, without a list around it.
            self._ahead.extend(
                Collection.restored(context.layout, one) for one in ([waiting] if "step" in waiting else waiting)
            )
            self._thread = self._new_thread()

    def _with_own_tokenizer(self) -> RunContext:
        """Return the context for another thread."""
        chat = self._context.chat
        return replace(self._context, chat=replace(chat, tokenizer=copy.deepcopy(chat.tokenizer)))

    def _new_thread(self) -> ThreadPoolExecutor:
        # OpenMP's thread count is set per thread, and the order of sums depends on it.
        return ThreadPoolExecutor(1, "sampling", _prepare, (torch.get_num_threads(), self._stop))

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        """Interrupt the thread and wait for it: the reward pool must not close while it is used."""
        self._stop.set()
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
                self._ahead.extend(coming.result())

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
