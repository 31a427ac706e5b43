"""Where the batch of a step comes from: collected when it is needed, or one step ahead, beside the update."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch

from retrain.run.clock import Clock
from retrain.run.collect import Collection, collate, collect
from retrain.run.run_parts import Parts
from retrain.training.expert_tokens import ExpertRow
from retrain.types import Rollout, State

_AHEAD = "ahead"
"""Key of the checkpoint under which a batch waits for its step."""


class Collector:
    """The batches of consecutive steps; a context manager, which no thread outlives.

    Let version v be the weights after v steps. Step t turns version t into version t + 1. With `[rollout] overlap`
    off its batch is sampled with version t. With it on, `begin` has a thread sample and score the batch of
    step t + 1 with version t, which the sampler holds, while the trainer is busy with step t; `sync` waits for it
    before the sampler gets version t + 1. So every batch is one version old, but for the first after a start
    without one: there was nothing to train meanwhile. The thread works between `begin` and `sync` only.
    Evaluations and checkpoints find it idle, and what it returns depends on no timing.

    The thread has a tokenizer of its own. It shares sampler, task, reward pool and expert rows with the trainer,
    which leaves them alone meanwhile, and never reads the policy's weights.

    Args:
        cursor: the next unused problem.
        saved: a checkpoint, in which a batch may be waiting.
    """

    def __init__(self, parts: Parts, cursor: int, saved: State | None = None) -> None:
        self.cursor = cursor
        self._parts, self._mine = parts, parts
        self._ahead: Collection | None = None
        self._coming: Future[Collection] | None = None
        self._thread: ThreadPoolExecutor | None = None
        if parts.config.rollout.overlap:
            self._mine = replace(parts, loaded=replace(parts.loaded, tokenizer=copy.deepcopy(parts.loaded.tokenizer)))
            self._ahead = _restored(parts, saved[_AHEAD]) if saved and _AHEAD in saved else None
            # A thread has its own number of threads in OpenMP; another number would sum in another order.
            threads = torch.get_num_threads()
            self._thread = ThreadPoolExecutor(1, "sampling", torch.set_num_threads, (threads,))

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the thread, whatever ended the run: the reward pool must not close under it."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int, clock: Clock) -> Collection:
        """The batch of a step: the one that waits for it, or else collected now."""
        if self._ahead is None:
            self._begin(step, clock)
            self._wait(clock)
        assert self._ahead is not None
        collection, self._ahead = self._ahead, None
        self.cursor = collection.cursor
        return collection

    def begin(self, step: int, clock: Clock) -> None:
        """Have the thread collect the batch of this step, if there is to be one; without a thread, nothing."""
        if self._thread is not None and step < self._parts.config.training.max_steps:
            self._begin(step, clock)

    def sync(self, version: int, clock: Clock) -> None:
        """Wait for the thread, then give the sampler the trainer's weights.

        Raises:
            RetrainError: whatever the thread raised, as it raised it.
        """
        if self._coming is not None:
            self._wait(clock)
        with clock("sync"):
            self._parts.sync(version)

    def state_dict(self, done: int) -> State:
        """The run's state after `done` steps, with the batch that waits."""
        waiting = {} if self._ahead is None else {_AHEAD: _state(self._ahead)}
        return self._parts.state_dict(done, self.cursor) | waiting

    def _begin(self, step: int, clock: Clock) -> None:
        if self._thread is None:
            self._ahead = self._collect(step, clock)
        else:
            self._coming = self._thread.submit(self._collect, step, clock)

    def _wait(self, clock: Clock) -> None:
        if self._coming is not None:
            coming, self._coming = self._coming, None
            with clock("wait"):
                self._ahead = coming.result()

    def _collect(self, step: int, clock: Clock) -> Collection:
        with clock("rollout"):
            collection = collect(self._mine, step, self.cursor)
        clock.tokens += collection.metrics["tokens/sampled"]
        return collection


def _state(collection: Collection) -> State:
    """A collection without its batch, which is made from the rest."""
    plain: State = {name: value for name, value in vars(collection).items() if name != "batch"}
    return plain | {name: [asdict(row) for row in plain[name]] for name in ("rollouts", "experts")}


def _restored(parts: Parts, state: Mapping[str, Any]) -> Collection:
    rollouts = [Rollout(**row) for row in state["rollouts"]]
    experts = [ExpertRow(**row) for row in state["experts"]]
    train = [rollouts[index] for index in state["kept"]]
    batch = collate(parts, train, state["step"], experts) if train or experts else None
    fields: State = {**state, "rollouts": rollouts, "experts": experts, "batch": batch}
    return Collection(**fields)
