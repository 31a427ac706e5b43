"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from retrain.errors import DivergedError, EngineError, Preempted, RetrainError, StorageError
from retrain.functional.seeds import derive_seed
from retrain.run.clock import Clock
from retrain.run.collect import Collection, with_policy_columns
from retrain.run.collector import Collector
from retrain.run.evaluate import evaluate
from retrain.run.parity import check_parity, fresh_batch, parity_due
from retrain.run.run_parts import Parts
from retrain.run.seeding import seed_generators
from retrain.run.stop_signal import Stop
from retrain.storage.run_directory import read_rows
from retrain.types import Batch, Metrics, State

_NONFINITE = "/nonfinite"
"""How the metrics end that say, of any model in training, that an update was skipped for its gradient."""

_MAX_NONFINITE = 3
"""Consecutive non-finite updates after which a run has diverged."""


def train(parts: Parts, stop: Stop, start: int = 0, cursor: int = 0, saved: State | None = None) -> None:
    """Train from step `start` to `[training] max_steps`.

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
    stop.defer(parts.sampler.hurry)
    with Collector(parts, cursor, saved) as collector:
        for step in range(start, settings.max_steps):
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
            if due(done, parts.config.eval.every, settings.max_steps):
                with _saving(parts, collector, stop, start, done):
                    evaluate_and_record(parts, done)
            if stop.requested or due(done, parts.config.checkpoint.every, settings.max_steps):
                parts.directory.save_checkpoint(done, collector.state_dict(done))
            if stop.requested and done < settings.max_steps:
                raise Preempted(f"stopped by {stop.requested} after step {done}; --resume auto goes on from there")


@contextmanager
def _saving(parts: Parts, collector: Collector, stop: Stop, start: int, done: int) -> Generator[None]:
    """A sampler that fails, or takes no weights because a file cannot be written, ends the run.

    The state after `done` steps is saved before, if that is possible, and the error says so. Where the run was to
    stop anyway, servers that were told the same are no error.
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
    """Save the state after `done` steps and say where a resumed run goes on; what forbids it hides no other error."""
    recorded = read_rows(parts.directory.path / "metrics.jsonl")
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


def parity(parts: Parts, collection: Collection, clock: Clock) -> Metrics:
    """The parity gate, where it is due and there is a batch; sampler and trainer hold the same weights now."""
    if collection.batch is None or not parity_due(parts, collection.step):
        return {}
    with clock("parity"):
        ahead = parts.config.rollout.overlap > 0
        return check_parity(parts, fresh_batch(parts, collection) if ahead else collection.batch)


def update(
    parts: Parts, collection: Collection, clock: Clock, sampler_is_free: Callable[[], None]
) -> tuple[Metrics, Batch | None]:
    """Parity gate, credit and one policy update; without a trainable row they are skipped and said so.

    Args:
        sampler_is_free: called once this step needs the sampler no more.
    """
    metrics = parity(parts, collection, clock)
    sampler_is_free()
    if collection.batch is None:
        return {"update/skipped": 1.0} | collection.dropped, None
    with clock("credit"):
        batch = with_policy_columns(parts, collection.batch)
        metrics |= parts.pipeline.before(batch)
        batch, credit = parts.pipeline.credit(batch)
        metrics |= credit | informative(parts, batch, collection.dropped)
    with clock("update"):
        metrics |= parts.policy.update(batch, parts.objective)
    with clock("credit"):
        metrics |= parts.pipeline.after(batch)
    return metrics, batch


def informative(parts: Parts, batch: Batch, dropped: Metrics) -> Metrics:
    """groups/informative: share of the step's groups that the filter keeps; its counts, and those of `dropped`."""
    keep, counts = parts.pipeline.informative(batch)
    share = len(batch.group_ids[keep & ~batch.is_expert].unique()) / parts.prompts
    return {"groups/informative": share} | {
        name: counts.get(name, 0.0) + dropped.get(name, 0.0) for name in {**counts, **dropped}
    }


def record(parts: Parts, collection: Collection, batch: Batch | None, metrics: Metrics) -> None:
    """Write the step's metrics row, its rollouts when due, and tell the trackers and the display."""
    step = collection.step
    row = {"step": step} | collection.metrics | metrics
    parts.directory.write_metrics(row)
    every = parts.config.logging.rollouts_every
    if every and step % every == 0:
        parts.directory.write_rollouts(step, rollout_rows(parts, collection, batch))
    for tracker in parts.trackers:
        tracker.log(step, row)
    sample = collection.rollouts[0]
    parts.observe("step", row | {"max_steps": parts.config.training.max_steps})
    parts.observe("sample", {"prompt": sample.prompt, "text": sample.text, "reward": sample.reward})


def rollout_rows(parts: Parts, collection: Collection, batch: Batch | None) -> Iterator[dict[str, Any]]:
    """Every rollout as a JSON row, with its tokens and, where it was trained on, the credit of each."""
    rows = {index: row for row, index in enumerate(collection.kept)} if batch is not None else {}
    for index, rollout in enumerate(collection.rollouts):
        tokens = [parts.loaded.decode([token]) for token in rollout.completion_ids]
        credit: dict[str, Any] = {}
        if batch is not None and index in rows:
            span = slice(len(rollout.prompt_ids), len(rollout.prompt_ids) + len(rollout.completion_ids))
            credit["advantages"] = batch.advantages[rows[index], span].tolist()
            if "planning_mask" in batch.extra:
                credit["planning"] = batch.extra["planning_mask"][rows[index], span].int().tolist()
        yield asdict(rollout) | {"tokens": tokens} | credit


def evaluate_and_record(parts: Parts, step: int) -> None:
    """Evaluate on held-out problems, if there are to be any, and write the row, unless it is there."""
    known = {row["step"] for row in read_rows(parts.directory.path / "eval.jsonl")}
    if not parts.config.eval.problems or step in known:
        return
    parts.observe("phase", {"name": f"evaluation after {step} steps"})
    began = time.perf_counter()
    row = evaluate(parts, step) | {"time/evaluation_s": time.perf_counter() - began}
    parts.directory.write_eval(row)
    for tracker in parts.trackers:
        tracker.log(step, {f"eval/{name}": value for name, value in row.items() if name != "step"})
    parts.observe("eval", row)


def due(done: int, every: int, total: int) -> bool:
    """After every `every` steps, and after the last one; `every` = 0 leaves only the last."""
    return done == total or (every > 0 and done % every == 0)
