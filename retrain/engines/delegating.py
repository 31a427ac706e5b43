"""Samplers around another engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from retrain.engines.batching import takes_requests
from retrain.protocols import Sampler
from retrain.types import Completion, Metrics, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


class DelegatingSampler(Sampler):
    """An engine whose methods call those of another. A subclass overrides `_guarded`, through which work passes."""

    def __init__(self, engine: Sampler) -> None:
        self._engine = engine
        self.tolerance, self.max_model_len = engine.tolerance, engine.max_model_len
        self.takes_adapters = engine.takes_adapters

    def _guarded(self, call: Callable[[], T]) -> T:
        return call()

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return self._guarded(lambda: self._engine.sample(requests, sampling))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._guarded(lambda: self._engine.load_weights(weights, version))

    def load_adapter(self, folder: Path, version: int) -> None:
        self._guarded(lambda: self._engine.load_adapter(folder, version))

    def describe(self) -> str:
        return self._engine.describe()

    def metrics(self) -> Metrics:
        return self._engine.metrics()

    def request_stop(self) -> None:
        self._engine.request_stop()

    def close(self) -> None:
        self._engine.close()


class ExclusiveSampler(DelegatingSampler):
    """An engine that samples batches, for several threads: one call at a time.

    In a continuous run the sampling thread uses it for batches of rollouts, and the trainer's thread for new weights,
    evaluations and parity checks. New weights therefore reach it between two batches.
    """

    def __init__(self, engine: Sampler) -> None:
        super().__init__(engine)
        self._lock = threading.Lock()

    def _guarded(self, call: Callable[[], T]) -> T:
        with self._lock:
            return call()


def for_continuous_sampling(sampler: Sampler) -> Sampler:
    """Return a sampler that two threads may use.

    This is the engine itself, switched to continuous mode, if it takes single requests, and otherwise an
    `ExclusiveSampler` around it.
    """
    if takes_requests(sampler):
        sampler.continuous = True
        return sampler
    return ExclusiveSampler(sampler)
