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
from typing import Any

import numpy as np
import torch

from retrain.errors import DivergedError, EngineError, Preempted, RetrainError, StorageError
from retrain.functional.devices import peak_memory
from retrain.functional.seeds import derive_seed
from retrain.protocols import tolerance_of
from retrain.run.collect import Collection, added, assign_credit, check_parity, collect, fresh_batch
from retrain.run.evaluate import evaluate
from retrain.run.rank_edges import check_credit
from retrain.run.run_parts import Parts
from retrain.run.stop_signal import Stop
from retrain.storage.run_files import read_rows
from retrain.types import Batch, Metrics, Rollout, State

_NONFINITE = "/nonfinite"
"""How the metrics end that say, of any model in training, that an update was skipped for its gradient."""

_AHEAD = "ahead"
"""Key of the checkpoint under which a batch waits for its step."""

_MAX_NONFINITE = 3
"""Consecutive non-finite updates after which a run has diverged."""


def train(parts: Parts, stop: Stop, start: int = 0, cursor: int = 0, saved: State | None = None) -> None:
    """Train from step `start` to `[training] max_steps`, or until a metric is where `stop_when` wants it.

    One step: sample, score, assign credit, update, sync the sampler's weights, write a metrics row; with
    `[rollout] overlap` sampling and scoring are one step ahead (see `Collector`).
    Everything random in a step derives from the seed and the step's number, so a run that is resumed
    from a checkpoint continues bit for bit.

    Args:
        start: optimizer steps already done; `cursor`: problems already drawn (both from a checkpoint).
        saved: the checkpoint.
    Raises:
        Preempted: SIGTERM arrived; a checkpoint of the last finished step has been written.
        DivergedError: loss or gradients were non-finite three times in a row.
        EngineError: sampler and trainer disagree; or the sampler failed, and what was trained has been saved.
        StorageError: the run directory cannot be written; what was trained has been saved if that was possible.
    """
    settings, nonfinite = parts.config.training, 0
    parts.sync(start)
    if start == 0 or due(start, parts.config.eval.every, settings.max_steps):
        evaluate_and_record(parts, start)
    stop.defer(parts.hurry)
    with Collector(parts, cursor, saved) as collector:
        for step in takewhile(lambda _: not parts.directory.stopped, range(start, settings.max_steps)):
            seed_generators(derive_seed(settings.seed, "step", step))
            clock, done = Clock(), step + 1
            with _saving(parts, collector, stop, start, step):
                collection = collector.take(step, clock)
            metrics, batch = update(parts, collection, clock, partial(collector.begin, done, clock))
            bad = [name for name, value in metrics.items() if value and name.endswith(_NONFINITE)]
            nonfinite = nonfinite + 1 if bad else 0
            with _saving(parts, collector, stop, start, done):
                try:
                    collector.sync(done, clock)
                finally:
                    record(parts, collection, batch, metrics | clock.metrics())
            if nonfinite >= _MAX_NONFINITE:
                raise diverged(parts, collection, batch, bad)
            parts.steps = done
            if due(done, parts.config.eval.every, _last(parts, done)):
                with _saving(parts, collector, stop, start, done):
                    evaluate_and_record(parts, done, collector)
            if (stopped := _agreed(parts, stop)) or due(done, parts.config.checkpoint.every, _last(parts, done)):
                parts.directory.save_checkpoint(done, collector.state_dict(done))
            if stopped and done < _last(parts, done):
                raise Preempted(f"stopped by {stopped} after step {done}; --resume auto goes on from there")


def _last(parts: Parts, done: int) -> int:
    """The last step of the run as far as is known after `done` steps, on all ranks: `done` or max_steps."""
    settings, directory = parts.config.training, parts.directory
    if settings.stop_when is not None:  # times differ between ranks
        directory.stopped = parts.ranks.same(directory.stopped)
    return done if directory.stopped else settings.max_steps


def _agreed(parts: Parts, stop: Stop) -> str:
    """The signal that has reached any rank: all leave the loop after the same step.

    One that arrives from here on counts after the next step: it must neither be lost nor end a rank alone, unsaved.
    """
    heard = next(filter(None, parts.ranks.every(stop.requested)), "")
    if heard:
        stop.requested = heard
    return heard


@contextmanager
def _saving(parts: Parts, collector: Collector, stop: Stop, start: int, done: int) -> Generator[None]:
    """A sampler that fails, or takes no weights because a file cannot be written, ends the run.

    The state after `done` steps is saved first if that is possible, and the error says whether it was. If the run
    was to stop anyway, servers that stopped as well are no error.
    """
    try:
        yield
    except (EngineError, StorageError) as error:
        if done == start and not stop.requested:
            raise
        kind = EngineError if isinstance(error, EngineError) else StorageError
        saved = "" if done == start else f"; {_rescue(parts, collector, done)}"
        if stop.requested and kind is EngineError:
            raise Preempted(f"stopped by {stop.requested}: {error}{saved}") from error
        raise kind(f"{error}{saved}") from error


def _rescue(parts: Parts, collector: Collector, done: int) -> str:
    """Save the state after `done` steps; says where a resumed run continues, or why nothing was saved."""
    try:
        recorded = parts.ranks.first(lambda: read_rows(parts.directory.path / "metrics.jsonl"))
    except RetrainError:
        recorded = []
    if not recorded or recorded[-1]["step"] != done - 1:
        return f"step {done} is not saved, for its metrics could not be: --resume auto goes on before it"
    try:
        if parts.directory.save_checkpoint(done, collector.state_dict(done)):
            return f"a checkpoint of step {done} is written: --resume auto goes on from there"
    except RetrainError as error:
        return f"nor is step {done} saved: {error}"
    return f"nor is step {done} saved"


def diverged(parts: Parts, collection: Collection, batch: Batch | None, bad: list[str]) -> DivergedError:
    """The end of a run whose updates are not finite any more; the batch of the last is stored."""
    step = collection.step
    parts.directory.write_rollouts(step, rollout_rows(parts, collection, batch), name="diverged")
    return DivergedError(
        f"loss or gradients were not finite {_MAX_NONFINITE} times in a row, last at step {step} "
        f"({', '.join(bad)}); the batch is in {parts.directory.path / 'rollouts'}; "
        "lower [optimizer] lr, or resume an earlier step"
    )


def update(
    parts: Parts, collection: Collection, clock: Clock, sampler_is_free: Callable[[], None]
) -> tuple[Metrics, Batch | None]:
    """Parity gate, credit and one policy update; without a trainable row update/skipped is 1 and nothing changes.

    Args:
        sampler_is_free: called once this step needs the sampler no more.
    """
    batch = collection.batch
    metrics = parity(parts, collection, clock)
    sampler_is_free()
    if batch is None:
        return {"update/skipped": 1.0} | collection.dropped, None
    with clock("credit"), parts.ranks.during(f"the credit of step {collection.step}"):
        if collection.credit is None:
            batch, credit = assign_credit(parts.pipeline, parts.policy, batch)
            keep, counts = parts.pipeline.informative(batch)
        else:  # what the filter drops is no part of the batch
            credit, keep, counts = collection.credit, ~batch.is_expert, Metrics()
        share = len(batch.group_ids[keep & ~batch.is_expert].unique()) / parts.prompts
        if parts.ranks.size > 1:
            check_credit(parts.ranks, parts.pipeline, batch)
        metrics |= credit | {"groups/informative": share} | added((collection.dropped, counts))
    with clock("update"), parts.ranks.during(f"the update of step {collection.step}"):
        metrics |= parts.policy.update(batch, parts.objective)
    with clock("credit"):
        metrics |= parts.pipeline.after(batch)
    return metrics, batch


def parity(parts: Parts, collection: Collection, clock: Clock) -> Metrics:
    """The parity gate after every `[rollout] parity_every` weight syncs, the first included; 0 switches it off."""
    settings = parts.config.rollout
    if collection.batch is None or not settings.parity_every or collection.step % settings.parity_every:
        return {}
    rounding = max(parts.sampler.tolerance, tolerance_of(parts.policy.settings.dtype))
    with clock("parity"):
        batch = fresh_batch(parts, collection) if settings.overlap else collection.batch
        return check_parity(parts.policy, batch, settings.parity_tolerance or rounding)


def record(parts: Parts, collection: Collection, batch: Batch | None, metrics: Metrics) -> None:
    """Write the step's metrics row, its rollouts when due, and tell the trackers and the display."""
    step = collection.step
    row = {"step": step} | collection.metrics | metrics
    parts.directory.append("metrics.jsonl", row)
    settings = parts.config.logging
    if settings.rollouts_every and step % settings.rollouts_every == 0:
        parts.directory.write_rollouts(step, rollout_rows(parts, collection, batch))
        if settings.completions:
            shown = shown_rows(collection.rollouts[: settings.completions])
            for tracker in parts.trackers:
                tracker.completions(step, shown)
    for tracker in parts.trackers:
        tracker.log(step, collection.metrics | metrics)
    shown = {"max_steps": parts.config.training.max_steps, "memory_mb": peak_memory(parts.policy.device) / 1e6}
    parts.observe("step", row | shown)
    parts.observe("sample", shown_rows(collection.rollouts[:1])[0])


def shown_rows(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """What a tracker shows of completions; every row has every reward."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.parts)
    return [
        {"prompt": one.prompt, "text": one.text, "answer": one.answer, "reward": one.reward}
        | {f"reward/{name}": one.parts.get(name) for name in names}
        for one in rollouts
    ]


def rollout_rows(parts: Parts, collection: Collection, batch: Batch | None) -> Iterator[dict[str, Any]]:
    """Every rollout as a JSON row, with its tokens and, where it was trained on, the credit of each."""
    rows = {index: row for row, index in enumerate(collection.kept)} if batch is not None else {}
    for index, rollout in enumerate(collection.rollouts):
        tokens = [parts.chat.decode([token]) for token in rollout.completion_ids]
        credit: dict[str, Any] = {}
        if batch is not None and index in rows:
            span = slice(len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.completion_ids))
            credit["advantages"] = batch.advantages[rows[index], span].tolist()
            for column, name in parts.pipeline.stored.items():
                credit[name] = batch.extra[column][rows[index], span].int().tolist()
        yield rollout.row() | {"tokens": tokens} | credit


def evaluate_and_record(parts: Parts, step: int, collector: Collector | None = None) -> None:
    """Evaluate on held-out problems, if there are to be any, and write the row, unless it is there.

    Args:
        collector: knows the state that is saved if the evaluation is the best so far; None saves none.
    """
    rows = parts.ranks.first(lambda: read_rows(parts.directory.path / "eval.jsonl"))
    known = {row["step"] for row in rows}
    if not (parts.config.eval.problems or parts.sets) or step in known:
        return
    parts.observe("phase", {"name": f"evaluation after {step} steps"})
    began = time.perf_counter()
    row = evaluate(parts, step) | {"time/evaluation_s": time.perf_counter() - began}
    parts.directory.append("eval.jsonl", row)
    for tracker in parts.trackers:
        tracker.log(step, {f"eval/{name}": value for name, value in row.items() if name != "step"})
    parts.observe("eval", row)
    key = (parts.config.checkpoint.best or "").removeprefix("eval/")
    if key and collector and parts.directory.is_best(key, step):
        parts.directory.save_checkpoint(step, collector.state_dict(step), best=True)


def due(done: int, every: int, total: int) -> bool:
    """After every `every` steps, and after the last one; `every` = 0 leaves only the last."""
    return done == total or (every > 0 and done % every == 0)


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators.

    Called at the start of every step, so that plug-ins which draw from them are reproducible, and a resumed
    run draws what it would have drawn without any generator's state in the checkpoint.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class Clock:
    """Wall time of the phases of a step, by name; phases of two threads may run at once, under different names.

    Attributes:
        tokens: sampled in the phase "rollout".
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
        """time/PHASE_s, time/step_s, and sampled tokens per second of rollout.

        Where the loop waited for a rollout in a thread, time/overlap_s is what it did not have to wait.
        """
        metrics = {f"time/{phase}_s": seconds for phase, seconds in self.spent.items()}
        if "rollout" in self.spent:
            rollout = self.spent["rollout"]
            metrics["time/tokens_per_s"] = self.tokens / max(rollout, 1e-9)
            if "wait" in self.spent:
                metrics["time/overlap_s"] = max(0.0, rollout - self.spent["wait"])
        return metrics | {"time/step_s": time.perf_counter() - self.began}


class Collector:
    """The batches of consecutive steps; a context manager, which no thread outlives.

    Let version v be the weights after v steps. Step t turns version t into version t + 1. With `[rollout] overlap`
    off its batch is sampled with version t. With `overlap = k`, `begin` makes a thread sample and score the batch of
    step t + k with version t, which the sampler holds, while the trainer is busy with step t; `sync` waits for it
    before the sampler gets version t + 1. So every batch is k versions old, but for the first k after a start
    without any, which are all sampled before its first step. The thread works between `begin` and `sync` only.
    Evaluations and checkpoints find it idle, and what it returns depends on no timing.

    The thread has its own tokenizer. It shares sampler, task, reward pool and expert rows with the trainer,
    which leaves them alone meanwhile, and never reads the policy's weights.

    Args:
        cursor: the next unused problem.
        saved: a checkpoint, in which batches may be waiting.
    """

    def __init__(self, parts: Parts, cursor: int, saved: State | None = None) -> None:
        self.cursor = cursor
        self._parts, self._mine = parts, parts
        self._ahead: deque[Collection] = deque()
        self._coming: Future[list[Collection]] | None = None
        self._thread: ThreadPoolExecutor | None = None
        if parts.config.rollout.overlap:
            self._mine = replace(parts, chat=replace(parts.chat, tokenizer=copy.deepcopy(parts.chat.tokenizer)))
            waiting: Any = (saved or {}).get(_AHEAD, ())
            # Where only one could wait it was no list.
            self._ahead.extend(Collection.restored(parts, one) for one in ([waiting] if "step" in waiting else waiting))
            # A thread has its own number of threads in OpenMP; another number would sum in another order.
            threads = torch.get_num_threads()
            self._thread = ThreadPoolExecutor(1, "sampling", torch.set_num_threads, (threads,))

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the thread, whatever ended the run: the reward pool must not close while it scores."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int, clock: Clock) -> Collection:
        """The batch of a step: the one that waits for it, or else collected now."""
        if not self._ahead:
            self.begin(step, clock)
            self._wait(clock)
        collection = self._ahead.popleft() if self._ahead else self._collect(step, self.cursor, clock)
        self.cursor = collection.cursor
        return collection

    def begin(self, step: int, clock: Clock) -> None:
        """Have the thread collect what is missing of the batches from this step on; without a thread, nothing."""
        end = min(step + self._parts.config.rollout.overlap, self._parts.config.training.max_steps)
        missing = range(step + len(self._ahead), end)
        if self._thread is not None and missing:
            cursor = self._ahead[-1].cursor if self._ahead else self.cursor
            self._coming = self._thread.submit(self._collect_all, missing, cursor, clock)

    def sync(self, version: int, clock: Clock) -> None:
        """Wait for the thread, then give the sampler the trainer's weights.

        Raises:
            RetrainError: whatever the thread raised, as it raised it.
        """
        self._wait(clock)
        with clock("sync"):
            self._parts.sync(version)

    def state_dict(self, done: int) -> State:
        """The run's state after `done` steps, with the batches that wait."""
        waiting = {_AHEAD: [one.state_dict() for one in self._ahead]} if self._ahead else {}
        return self._parts.state_dict(done, self.cursor) | waiting

    def _wait(self, clock: Clock) -> None:
        if self._coming is not None:
            coming, self._coming = self._coming, None
            with clock("wait"):
                self._ahead.extend(coming.result())

    def _collect_all(self, steps: Sequence[int], cursor: int, clock: Clock) -> list[Collection]:
        found: list[Collection] = []
        for step in steps:
            found.append(self._collect(step, cursor, clock))
            cursor = found[-1].cursor
        return found

    def _collect(self, step: int, cursor: int, clock: Clock) -> Collection:
        with clock("rollout"), self._parts.ranks.rollouts.during(f"the rollouts of step {step}"):
            collection = collect(self._mine, step, cursor)
        clock.tokens += collection.metrics["tokens/sampled"]
        return collection
