"""A sampler around another engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

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
