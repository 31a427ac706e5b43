"""The training loop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from retrain.errors import DivergedError
from retrain.functional.devices import peak_memory
from retrain.functional.seeds import derive_seed
from retrain.protocols import Ranks
from retrain.run.collectors.collector import Collector, PhaseTimer
from retrain.run.collectors.rollout_metrics import added
from retrain.run.collectors.rounds import Collection
from retrain.run.collectors.steps import StepCollector
from retrain.run.evaluate import measure
from retrain.run.parity import parity
from retrain.run.rescue import saving
from retrain.run.run_context import RunContext
from retrain.run.stop_signal import Stop
from retrain.storage.run_files import read_rows
from retrain.training.cpu_kernels import unscanned_heap
from retrain.types import Batch, Metrics, Rollout, State

if TYPE_CHECKING:
    from retrain.algorithms.graph.pipeline import Pipeline
    from retrain.training.chat import Chat

_MAX_NONFINITE = 3
"""Number of consecutive non-finite updates after which a run has diverged."""


@unscanned_heap()
def train(context: RunContext, stop: Stop, start: int = 0, cursor: int = 0, saved: State | None = None) -> None:
    """Train from step `start` to `[training] max_steps`, or until `stop_when` is met.

    One step: sample and score, check parity, assign credit, update, sync the sampler's weights, write a metrics row;
    when due, evaluate and save a checkpoint. With `[rollout] overlap` or mode "continuous", sampling and scoring go on
    from the end of the parity check (see `Collector.begin`).
    All random numbers of a step derive from the seed and the step's number, so a resumed run
    continues bit for bit.

    Args:
        stop: requested by a signal.
        start: steps already done.
        cursor: index of the task's next unused problem.
        saved: the checkpoint that the run resumes from, if any.
    Raises:
        Preempted, KeyboardInterrupt: a signal arrived; a checkpoint of the last finished step has been written.
        DivergedError: loss or gradients were not finite in three consecutive updates.
        EngineError: sampler and trainer disagree, or the sampler failed. In the second case the
            state of training has been saved.
        StorageError: the run directory cannot be written. The state of training has been saved if
            that was possible.
    """
    settings = context.config.training
    # Before the evaluation, which samples with these weights.
    context.sync(start)
    # The run that is resumed may have failed during this evaluation.
    if start == 0 or due(start, context.config.eval.every, settings.max_steps):
        evaluate_and_record(context, start)
    stop.defer(context.request_stop)
    if start < settings.max_steps:
        context.directory.drop_model()
    with _collector(context, cursor, saved, stop) as collector:
        for step in range(start, settings.max_steps):
            # The rows of an earlier part of the run may have met `stop_when`.
            if context.directory.stop_reason:
                break
            seed_generators(derive_seed(settings.seed, "step", step))
            timer, done = PhaseTimer(), step + 1
            with saving(context.directory, collector, stop, start, step):
                collection = collector.take(step, timer)
            metrics, batch = update(context, collection, timer, partial(collector.begin, done, timer))
            with saving(context.directory, collector, stop, start, done):
                try:
                    metrics |= collector.sync(done, timer, batch)
                finally:
                    # Also if the sync fails: the update has been made, and a checkpoint of it needs its row.
                    record(context, collection, batch, metrics | timer.metrics())
            if bad := _nonfinite_models(context):
                # The rollouts of the last update, whatever `[logging] rollouts_every` says.
                rows = rollout_rows(context.chat, context.trained.pipeline, collection, batch)
                context.directory.write_rollouts(collection.step, rows, name="diverged")
                raise _diverged(context, step, bad)
            context.trained.steps = done
            if due(done, context.config.eval.every, _agreed_end(context, done)):
                with saving(context.directory, collector, stop, start, done):
                    evaluate_and_record(context, done, collector)
            end = _agreed_end(context, done)  # again, because the evaluation may have met `stop_when`
            signal = _agreed_signal(context.ranks, stop)
            if signal or due(done, context.config.checkpoint.every, end):
                _checkpoint(context, collector, done, stop if signal and done < end else None)


def _collector(context: RunContext, cursor: int, saved: State | None, stop: Stop) -> Collector:
    """Return the collector of `[rollout] mode`."""
    if context.config.rollout.continuous:
        from retrain.run.collectors.continuous import ContinuousCollector

        return ContinuousCollector(context, cursor, saved, stop)
    return StepCollector(context, cursor, saved)


def _checkpoint(context: RunContext, collector: Collector, done: int, stop: Stop | None) -> None:
    """Save the state after `done` steps; raise the exception of `stop`, if it ends the run before its last step."""
    left = collector.drain() if stop else ""
    context.directory.save_checkpoint(done, collector.state_dict(done))
    if unsaved := context.trained.pipeline.unsaved():
        context.observe("message", {"text": unsaved, "level": "warning"})
    if stop:
        raise stop.stopped(f" after step {done}; --resume auto continues from there{left}")


def _agreed_end(context: RunContext, done: int) -> int:
    """Take over rank 0's decision on `stop_when`, and return the number of the run's last step.

    It is `done` if the condition is met, otherwise max_steps. The ranks may see different values of a metric of time.
    """
    settings = context.config.training
    directory = context.directory
    if settings.stop_when is not None:
        directory.stop_reason = context.ranks.broadcast(directory.stop_reason)
    return done if directory.stop_reason else settings.max_steps


def _agreed_signal(ranks: Ranks, stop: Stop) -> str:
    """Take over a signal that any rank has received, and return its name, or "".

    All ranks agree on it, so they leave the loop after the same step. A signal that arrives later
    counts after the next step.
    """
    received = next(filter(None, ranks.all_gather(stop.requested)), "")
    if received:
        stop.requested = received
    return received


def _nonfinite_models(context: RunContext) -> list[str]:
    """Return the names of the models that skipped their last three updates, because a loss or gradient was not finite.

    We look at `nonfinite` of the models, not at metrics: a plug-in could report update/nonfinite itself.
    """
    models = {"policy": context.trained.policy}
    models |= {name: getattr(part, "model", None) for name, part in context.trained.pipeline.stateful.items()}
    return [name for name, model in models.items() if getattr(model, "nonfinite", 0) >= _MAX_NONFINITE]


def _diverged(context: RunContext, step: int, models: list[str]) -> DivergedError:
    return DivergedError(
        f"loss or gradients were not finite {_MAX_NONFINITE} times in a row, last at step {step} "
        f"({', '.join(models)}); the batch is in {context.directory.path / 'rollouts'}; "
        "lower [optimizer] lr, or resume an earlier step"
    )


def update(
    context: RunContext, collection: Collection, timer: PhaseTimer, on_sampler_free: Callable[[], None]
) -> tuple[Metrics, Batch | None]:
    """Check parity, assign credit and update the policy.

    Without a row to train on, nothing changes and the metric update/skipped is 1.

    Args:
        on_sampler_free: called once this step no longer needs the sampler.
    Returns:
        Metrics, and the batch with its advantages; None without a row to train on.
    """
    metrics = parity(context, collection, timer)
    on_sampler_free()
    if collection.batch is None:
        return {"update/skipped": 1.0} | collection.dropped_metrics, None
    pipeline = context.trained.pipeline
    with timer("credit"), context.ranks.during(f"the credit of step {collection.step}"):
        credited = context.trained.credit(collection.batch, begins_step=True)
        batch = credited.batch
        # Rows of the step come first, so that `keep` of stored and expert rows does not count.
        sampled = torch.arange(len(credited.keep), device=credited.keep.device) < len(collection.kept)
        informative = len(batch.group_ids[credited.keep & sampled].unique()) / context.prompts
        if context.ranks.size > 1:
            from retrain.run.distributed_wrappers import check_credit

            check_credit(context.ranks, pipeline, batch)
        metrics |= credited.metrics | {"groups/informative": informative}
        metrics |= added((collection.dropped_metrics, credited.dropped_metrics))
        if unmarked := pipeline.unmarked(batch):
            context.observe("message", {"text": unmarked, "level": "warning"})
    latest = batch
    first_report = Metrics()

    def recredit() -> Tensor:
        """Return the advantages of the next epoch, for signals that are trained in every epoch."""
        nonlocal latest, first_report
        latest, report = pipeline.next_epoch(latest)
        # In later epochs the signals have already been trained on the batch, so that their metrics say less.
        first_report = first_report or report
        return latest.advantages

    with timer("update"), context.ranks.during(f"the update of step {collection.step}"):
        if pipeline.holds_policy(collection.step):
            metrics |= {"update/skipped": 1.0, "update/held": 1.0}
        else:
            objective = context.trained.objective
            metrics |= context.trained.policy.update(batch, objective, recredit if pipeline.is_epochwise else None)
    with timer("credit"):
        metrics |= pipeline.after(latest) | first_report
    return metrics, batch


def record(context: RunContext, collection: Collection, batch: Batch | None, metrics: Metrics) -> None:
    """Write the step's metrics row and, when due, its rollouts; update trackers and display."""
    step = collection.step
    row = {"step": step} | collection.metrics | metrics
    context.directory.append("metrics.jsonl", row)
    settings = context.config.logging
    if settings.rollouts_every and step % settings.rollouts_every == 0:
        context.directory.write_rollouts(step, rollout_rows(context.chat, context.trained.pipeline, collection, batch))
        if settings.completions:
            shown = shown_rows(collection.rollouts[: settings.completions])
            for tracker in context.trackers:
                tracker.completions(step, shown)
    for tracker in context.trackers:
        tracker.log(step, collection.metrics | metrics)
    shown = {
        "max_steps": context.config.training.max_steps,
        "memory_mb": peak_memory(context.trained.policy.device) / 1e6,
    }
    context.observe("step", row | shown)
    context.observe("sample", shown_rows(collection.rollouts[:1])[0])
    if context.findings is not None:
        context.findings.after_step(row, collection.rollouts)


def shown_rows(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
    """Return rows of completions for a tracker. All rows have the same columns."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.parts)
    return [
        {"prompt": rollout.prompt, "text": rollout.text, "answer": rollout.answer, "reward": rollout.reward}
        | {f"reward/{name}": rollout.parts.get(name) for name in names}
        for rollout in rollouts
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
            for column, name in pipeline.flags_to_store.items():
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
    figures, completions = measure(context, step)
    row = figures | {"time/evaluation_s": time.perf_counter() - began}
    for name, rows in completions.items():  # before the row, which marks the evaluation as done
        context.directory.write_evaluation(step, name, rows)
    context.directory.append("eval.jsonl", row)
    for tracker in context.trackers:
        tracker.log(step, {f"eval/{name}": value for name, value in row.items() if name != "step"})
    context.observe("eval", row)
    if context.findings is not None:
        context.findings.after_evaluation(row)
    key = (context.config.checkpoint.best or "").removeprefix("eval/")
    if key and collector and context.directory.is_best(key, step):
        context.directory.save_checkpoint(step, collector.state_dict(step), best=True)


def due(done: int, every: int, total: int) -> bool:
    """Return True after every `every` steps and after the last; with `every` = 0 only after the last."""
    return done == total or (every > 0 and done % every == 0)


@contextmanager
def torch_of_its_own() -> Generator[None]:
    """Give the block torch's default modes; restore the caller's modes, threads and generators of torch and NumPy.

    A program may call `retrain.train` under `torch.no_grad`, with float64 as default, or between its own draws.
    """
    numbers = np.random.get_state()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    # A device as context is a mode that every call of torch passes through, so it is not entered without need.
    cpu = torch.device("cpu") if torch.get_default_device().type != "cpu" else nullcontext()
    gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with (
        cpu,
        torch.random.fork_rng(gpus),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False) if gpus else nullcontext(),
    ):
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)
            torch.set_num_threads(threads)
            np.random.set_state(numbers)


def seed_generators(seed: int) -> None:
    """Seed Python's, NumPy's and torch's global generators.

    The loop calls this at the start of every step. Plug-ins that draw from these generators are then
    reproducible, also in a resumed run, without generator states in the checkpoint.
    """
    random.seed(seed)
    # NumPy's global generator takes 32 bits.
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
