"""Samplers for several ranks, and the check that all ranks computed the same credit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from retrain.engines.delegating import DelegatingSampler
from retrain.errors import ComponentError, UserCodeError
from retrain.functional.weights import as_lazy
from retrain.protocols import Ranks, Sampler
from retrain.registry import engine as engine_kind
from retrain.types import BASE_COLUMNS, Batch, Completion, Metrics, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.algorithms.graph.pipeline import Pipeline
    from retrain.registry import Component

T = TypeVar("T")


class SharedSampler(DelegatingSampler):
    """An engine in the process of every rank; each samples its share of the requests.

    The random draws of a request do not depend on the other requests of a call, so the completions
    equal those of a single rank.
    """

    def __init__(self, engine: Sampler, ranks: Ranks) -> None:
        super().__init__(engine)
        self._ranks = ranks.rollouts

    def _guarded(self, call: Callable[[], T]) -> T:
        return self._ranks.on_each_rank(call)[self._ranks.rank]

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        rank, size = self._ranks.rank, self._ranks.size
        share = requests[rank::size]
        shares = self._ranks.on_each_rank(lambda: self._engine.sample(share, sampling) if share else [])
        # `share` is every `size`-th request, so request i is number i // size on rank i % size.
        return [shares[index % size][index // size] for index in range(len(requests))]

    def run_on_rank0(self, play: Callable[[Sampler], T]) -> T:
        if self._ranks.rank:
            while (call := self._ranks.broadcast(cast("tuple[Sequence[Request], Sampling] | None", None))) is not None:
                with suppress(Exception):  # every rank gets this error; rank 0 handles it for all
                    self.sample(*call)

        def playing() -> T:
            try:
                return play(_Leading(self._engine, self._ranks))
            finally:
                # Also after an error, because the other ranks wait for a call.
                self._ranks.broadcast(None)

        return self._ranks.on_rank0(playing)

    def describe(self) -> str:
        return f"{self._engine.describe()}, on each of {self._ranks.size} ranks"

    def metrics(self) -> Metrics:
        return self._ranks.on_rank0(self._engine.metrics)


class _Leading(SharedSampler):
    """The sampler of rank 0 in `run_on_rank0`: it broadcasts each call to the other ranks."""

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        self._ranks.broadcast((requests, sampling))
        return super().sample(requests, sampling)


class RemoteSampler(DelegatingSampler):
    """A remote engine, which only rank 0 is connected to.

    Args:
        build: builds the engine; called on rank 0 only.
    """

    def __init__(self, build: Callable[[], Sampler], ranks: Ranks) -> None:
        self._ranks = ranks.rollouts
        engine = self._engine = cast("Sampler", self._ranks.only_on_rank0(build))  # None on the other ranks
        # The other ranks have no engine to ask.
        facts = self._ranks.on_rank0(lambda: (engine.tolerance, engine.takes_adapters, engine.describe()))
        self.tolerance, self.takes_adapters, self._text = facts

    def _guarded(self, call: Callable[[], T]) -> T:
        return self._ranks.on_rank0(call)

    def run_on_rank0(self, play: Callable[[Sampler], T]) -> T:
        return self._ranks.on_rank0(lambda: play(self._engine))

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load weights into rank 0's engine.

        Gathering a sharded weight takes all ranks. Rank 0 therefore broadcasts the name of each
        weight that its engine reads, and "" after the last.
        """
        lazy_weights = as_lazy(weights)
        if self._ranks.rank:
            while (name := self._ranks.broadcast("")) != "":
                lazy_weights.frozen(name)

        def load() -> None:
            try:
                shared = lazy_weights.read_by(lambda name: lazy_weights.frozen(self._ranks.broadcast(name)))
                self._engine.load_weights(shared, version)
            finally:
                self._ranks.broadcast("")

        self._ranks.on_rank0(load)

    def describe(self) -> str:
        return self._text

    def metrics(self) -> Metrics:
        return self._ranks.on_rank0(lambda: self._engine.metrics())

    def request_stop(self) -> None:
        if self._ranks.rank == 0:
            super().request_stop()

    def close(self) -> None:
        if self._ranks.rank == 0:
            super().close()


def build_sampler(engine: Component, resources: Mapping[str, Any], ranks: Ranks) -> Sampler:
    """Build the engine of a run on several ranks.

    Raises:
        ComponentError: the engine cannot be used on several ranks.
    """
    if engine_kind.traits_of(engine).own_process_group:
        raise ComponentError(
            f'engine "{engine.name}" needs torch.distributed for itself, and this run has ranks',
            'set engine = "vllm-server" and start servers with retrain serve',
        )
    if engine_kind.traits_of(engine).remote:
        return RemoteSampler(partial(engine.build, resources), ranks)
    return SharedSampler(engine.build(resources), ranks)


def check_credit(ranks: Ranks, pipeline: Pipeline, batch: Batch) -> None:
    """Check that all ranks computed the same advantages, and the same inputs of them, for a batch.

    Raises:
        UserCodeError: a column differs between ranks. The error names the component that computed the first such
            column.
    """
    # In the order of computation, so that the first difference names its cause.
    columns = [*sorted(BASE_COLUMNS - {"advantages"}), *batch.extra, "advantages"]
    every = ranks.all_gather([(name, _digest(batch.column(name))) for name in columns])
    differs = next((digests for digests in zip(*every, strict=True) if len(set(digests)) > 1), None)
    if differs is None:
        return
    column = differs[0][0]
    kinds = ("advantage", "transform", "algorithm") if column == "advantages" else ()
    stages = [stage for stage in pipeline.graph if stage.writes == column or stage.kind in kinds]
    # Code of the user is the likelier cause.
    suspects = [stage for stage in stages if stage.source != "built-in"] or stages
    culprit = " or ".join(f'{stage.kind} "{stage.name}"' for stage in suspects) or "the task"
    raise UserCodeError(
        f"{culprit} is not deterministic: {column} of step {batch.step} differs between ranks, which compute it from "
        "the same data; draw random numbers from the seeded global generators, and sort sets before you use them"
    )


def _digest(value: Any) -> str:
    """Return the sha256 of a tensor, or the `repr` of any other value."""
    if not hasattr(value, "cpu"):
        return repr(value)
    import torch

    flat = value.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()  # numpy has no bfloat16
