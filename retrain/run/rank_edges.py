"""The edges of a run on several ranks: what rank 0 does for all of them, and what each does a share of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast

from retrain.errors import ComponentError, UserCodeError
from retrain.protocols import Gathering, Ranks, Sampler, shapes_of
from retrain.storage import checkpoint
from retrain.storage.run_directory import ExistingRun, RunDirectory
from retrain.types import BASE_COLUMNS, Adapted, Batch, Completion, Metrics, Observer, Request, Sampling, Score, State

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.algorithms.graph.pipeline import Pipeline
    from retrain.config.schema import Checkpoint
    from retrain.registry import Bound
    from retrain.rewards.pool import RewardPool

T = TypeVar("T")


class SharedDirectory(RunDirectory):
    """A run directory that rank 0 writes; every rank gets what it reads, and its errors.

    Checkpoints are written and read by all ranks, so the directory must be one that all of them see.
    """

    def __init__(self, path: Path, mode: ExistingRun, settings: Checkpoint, observe: Observer, ranks: Ranks) -> None:
        super().__init__(path, mode, settings, observe)
        self.ranks = ranks

    def __enter__(self) -> RunDirectory:
        self._once(super().__enter__)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self.ranks.rank == 0:
            super().__exit__(kind, error, trace)

    def previous_config(self, path: Path | None = None) -> dict[str, Any]:
        return self.ranks.first(partial(super().previous_config, path))

    def write_config(self, source: str, started: Mapping[str, Any]) -> None:
        self._once(partial(super().write_config, source, started))

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        self._once(partial(super().write_environment, environment))

    def restore(self, path: Path | None = None, accept: Callable[[State], None] = lambda _: None) -> State | None:
        """As in a run directory; rank 0 has verified what the others read."""
        found: list[State | None] = []
        self._once(lambda: found.append(RunDirectory.restore(self, path, accept)))
        self.restored = self.ranks.same(self.restored)
        if self.ranks.rank:
            found.append(checkpoint.read(self.restored) if self.restored else None)
        return found[0]

    def is_best(self, key: str, done: int) -> bool:
        return self.ranks.first(partial(super().is_best, key, done))

    def append(self, name: Literal["metrics.jsonl", "eval.jsonl"], row: Mapping[str, Any]) -> None:
        self._once(partial(super().append, name, row))

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]], name: str = "step") -> Path:
        return self.ranks.first(partial(super().write_rollouts, step, rows, name))

    def _flush(self) -> None:
        self._once(super()._flush)

    def _once(self, write: Callable[[], object]) -> None:
        """Call this on rank 0; what it returns stays there."""

        def done() -> None:
            write()

        self.ranks.first(done)


class SharedSampler(Sampler):
    """An engine in every rank's process, each of which samples its share of the requests.

    What a request draws does not depend on the others of a call, so the completions are those of one rank.
    """

    def __init__(self, engine: Sampler, ranks: Ranks) -> None:
        self._engine, self._ranks = engine, ranks.rollouts
        self.tolerance, self.room, self.takes_adapters = engine.tolerance, engine.room, engine.takes_adapters

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        rank, size = self._ranks.rank, self._ranks.size
        share = requests[rank::size]
        found = self._ranks.each(lambda: self._engine.sample(share, sampling) if share else [])
        return [found[index % size][index // size] for index in range(len(requests))]

    def lead(self, play: Callable[[Sampler], T]) -> T:
        if self._ranks.rank:
            while (call := self._ranks.same(cast("tuple[Sequence[Request], Sampling] | None", None))) is not None:
                with suppress(Exception):  # rank 0 has the same error, and shares what becomes of it
                    self.sample(*call)

        def playing() -> T:
            try:
                return play(_Leading(self._engine, self._ranks))
            finally:
                self._ranks.same(None)

        return self._ranks.first(playing)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        self._ranks.each(lambda: self._engine.load_weights(weights, version))

    def load_adapter(self, folder: Path, version: int) -> None:
        self._ranks.each(lambda: self._engine.load_adapter(folder, version))

    def describe(self) -> str:
        return f"{self._engine.describe()}, on each of {self._ranks.size} ranks"

    def metrics(self) -> Metrics:
        return self._ranks.first(self._engine.metrics)

    def hurry(self) -> None:
        self._engine.hurry()

    def close(self) -> None:
        self._engine.close()


class _Leading(SharedSampler):
    """The shared engine on rank 0, which tells the other ranks what to sample."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self._ranks.same((requests, sampling))
        return super().sample(requests, sampling)


class RemoteSampler(Sampler):
    """An engine elsewhere, which rank 0 talks to.

    Args:
        build: makes the engine; called on rank 0.
    """

    def __init__(self, build: Callable[[], Sampler], ranks: Ranks) -> None:
        self._engines: list[Sampler] = []
        self._ranks = ranks.rollouts

        def first() -> tuple[float, bool, str]:
            self._engines.append(build())
            [engine] = self._engines
            return engine.tolerance, engine.takes_adapters, engine.describe()

        self.tolerance, self.takes_adapters, self._text = self._ranks.first(first)

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        return self._ranks.first(lambda: self._engines[0].sample(requests, sampling))

    def lead(self, play: Callable[[Sampler], T]) -> T:
        return self._ranks.first(lambda: play(self._engines[0]))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Whatever rank 0's engine reads of the weights, the other ranks read as well: each has only its shards."""
        base = weights.base if isinstance(weights, Adapted) else weights
        if self._ranks.rank:
            while (name := self._ranks.same("")) != "":
                base[name]

        def load() -> None:
            led = _Led(base, self._ranks)
            try:
                adapted = Adapted(led, weights.updates) if isinstance(weights, Adapted) else led
                self._engines[0].load_weights(adapted, version)
            finally:
                self._ranks.same("")

        self._ranks.first(load)

    def load_adapter(self, folder: Path, version: int) -> None:
        self._ranks.first(lambda: self._engines[0].load_adapter(folder, version))

    def describe(self) -> str:
        return self._text

    def metrics(self) -> Metrics:
        return self._ranks.first(lambda: self._engines[0].metrics())

    def hurry(self) -> None:
        for engine in self._engines:
            engine.hurry()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


class _Led(Gathering):
    """Weights on rank 0, which tells the other ranks what it reads."""

    def __init__(self, weights: Mapping[str, Tensor], ranks: Ranks) -> None:
        self._weights, self._ranks, self.shapes = weights, ranks, shapes_of(weights)
        self.untied, self.rank = list(weights), 0

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._weights:
            raise KeyError(name)
        return self._weights[self._ranks.same(name)]

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


class _Unread:
    """A sharded model for an engine that is being built: it reads the structure, and waits for `load_weights`."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def get_base_model(self) -> Any:
        return self._model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def build_sampler(engine: Bound, resources: Mapping[str, Any], ranks: Ranks) -> Sampler:
    """The run's engine, for all ranks.

    Raises:
        ComponentError: the engine cannot be used on several ranks.
    """
    if ranks.mesh is None:
        return engine.build(resources)
    if engine.component.traits.get("alone", False):
        raise ComponentError(
            f'engine "{engine.name}" needs torch.distributed for itself, and this run has ranks',
            'set engine = "vllm-server" and start servers with retrain serve',
        )
    if engine.component.traits.get("elsewhere", False):
        return RemoteSampler(partial(engine.build, resources), ranks)
    model = resources["model"]
    unread = model if hasattr(model, "get_base_model") else _Unread(model)
    return SharedSampler(engine.build({**resources, "model": unread}), ranks)


class Pool(Protocol):
    """What scores completions: the reward processes, or rank 0's."""

    def score(self, items: Sequence[Mapping[str, Any]]) -> list[Score]:
        """One score per item, in their order."""
        ...

    def close(self) -> None:
        """End the processes."""
        ...


class SharedPool(Pool):
    """Rank 0's reward processes: rewards may time out, so they are data, which every rank must have alike."""

    def __init__(self, build: Callable[[], RewardPool], ranks: Ranks) -> None:
        self._pools = [build()] if ranks.rank == 0 else []
        self._ranks = ranks.rollouts

    def score(self, items: Sequence[Mapping[str, Any]]) -> list[Score]:
        return self._ranks.first(lambda: self._pools[0].score(items))

    def close(self) -> None:
        for pool in self._pools:
            pool.close()


def check_credit(ranks: Ranks, pipeline: Pipeline, batch: Batch) -> None:
    """UserCodeError if the ranks computed different credit for one batch: they would train different losses.

    It names the first column that differs, in the order of computation, and what computes it.
    """
    columns = [*sorted(BASE_COLUMNS - {"advantages"}), *batch.extra, "advantages"]
    every = ranks.every([(name, _digest(batch.column(name))) for name in columns])
    differs = next((one for one in zip(*every, strict=True) if len(set(one)) > 1), None)
    if differs is None:
        return
    column = differs[0][0]
    kinds = ("advantage", "transform", "algorithm") if column == "advantages" else ()
    stages = [stage for stage in pipeline.graph if stage.writes == column or stage.kind in kinds]
    suspects = [stage for stage in stages if stage.bound.component.source != "built-in"] or stages
    culprit = " or ".join(f'{stage.kind} "{stage.name}"' for stage in suspects) or "the task"
    raise UserCodeError(
        f"{culprit} is not deterministic: {column} of step {batch.step} differs between ranks, which compute it from "
        "the same data; draw random numbers from the seeded global generators, and sort sets before you use them"
    )


def _digest(value: Any) -> str:
    """sha256 of a column, or the text of what is no tensor."""
    if not hasattr(value, "cpu"):
        return repr(value)
    import torch

    flat = value.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()  # numpy has no bfloat16
