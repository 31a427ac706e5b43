"""The interface of collectors, and what both of them use: a timer, a thread for sampling, and its own context."""

from __future__ import annotations

import copy
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol, Self

import torch

from retrain.run.collectors.rounds import Collection
from retrain.run.run_context import RunContext
from retrain.system.event_loop import StopFlag
from retrain.types import Batch, Metrics, State


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
            # The clock may not have moved.
            metrics["time/tokens_per_s"] = self.tokens / max(rollout, 1e-9)
            if "wait" in self.spent:
                metrics["time/overlap_s"] = max(0.0, rollout - self.spent["wait"])
        return metrics | {"time/step_s": time.perf_counter() - self.began}


class Collector(Protocol):
    """Collects the rollouts of consecutive steps. It is a context manager, whose end waits for its threads.

    In each step the loop calls `take`, `begin` once the step no longer needs the sampler, and `sync` after the update.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *details: object) -> None: ...

    def take(self, step: int, timer: PhaseTimer) -> Collection:
        """Return the rollouts of a step, with their batch."""
        ...

    def begin(self, step: int, timer: PhaseTimer) -> None:
        """Start collecting for this and later steps, if the collector samples ahead."""
        ...

    def sync(self, version: int, timer: PhaseTimer, batch: Batch | None) -> Metrics:
        """Pass the trained batch to the row sources, load the new weights into the sampler, and return metrics.

        Raises:
            RetrainError: the error that ended the sampling.
        """
        ...

    def drain(self) -> str:
        """Complete what is in flight, because the run is asked to stop.

        Returns:
            The end of a sentence about what is left.
        """
        ...

    def state_dict(self, done: int) -> State:
        """Return the run's state after `done` steps, with what is collected for later ones."""
        ...


def with_own_tokenizer(context: RunContext) -> RunContext:
    """Return the context for a thread: fast tokenizers must not be used by two threads at once."""
    return replace(context, chat=replace(context.chat, tokenizer=copy.deepcopy(context.chat.tokenizer)))


def sampling_thread(interrupt: StopFlag) -> ThreadPoolExecutor:
    """Return a thread that samples, and that ends its waiting when the flag is set."""
    # OpenMP's thread count is set per thread, and the order of sums depends on it.
    threads = torch.get_num_threads()

    def prepare() -> None:
        torch.set_num_threads(threads)
        interrupt.adopt()

    return ThreadPoolExecutor(1, "sampling", prepare)
