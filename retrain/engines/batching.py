"""Lanes: a coroutine interface to an engine that samples requests either one by one or in batches."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from retrain.protocols import Sampler
from retrain.system.event_loop import call_in_caller
from retrain.types import Completion, Request, Sampling

Key = tuple[int, ...]
"""Sort key of a request in its batch, so that the order does not depend on arrival times."""


class Lane(Protocol):
    """Coroutine interface to an engine. Coroutines of one lane may wait for each other's batches."""

    async def generate(self, request: Request, key: Key) -> list[Completion]:
        """Return the completions of a request."""
        ...

    def parties(self, change: int) -> None:
        """Add `change` to the number of coroutines that may make requests, one at a time each."""

    def close(self) -> None:
        """Cancel the batch that is being sampled."""


class RequestLane(Lane):
    """Passes each request to the engine immediately."""

    def __init__(self, sampler: Any, sampling: Sampling) -> None:
        self._sampler, self._sampling = sampler, sampling

    async def generate(self, request: Request, key: Key) -> list[Completion]:
        return await self._sampler.generate(request, self._sampling)


class BatchLane(Lane):
    """Collects requests and samples them in one call, in the thread that waits in `event_loop.run`.

    A batch starts once every party has a waiting request, as at a barrier that parties can join and
    leave. The composition of a batch therefore depends on the environments' observations and not on
    their speed. A party that starts others must add them before it leaves. Parties must not wait for
    each other outside the lane, because that would be a deadlock.

    Args:
        sample: the engine's `sample`, with the sampling parameters bound.
        eager: start a batch as soon as the engine is free and any request waits. Slow environments then do not delay
            other requests, but the composition of batches depends on timing.
    """

    def __init__(self, sample: Callable[[Sequence[Request]], list[list[Completion]]], eager: bool = False) -> None:
        self._sample, self._eager = sample, eager
        self._waiting: list[tuple[Key, Request, asyncio.Future[list[Completion]]]] = []
        self._parties = 0
        self._batch: asyncio.Task[None] | None = None

    async def generate(self, request: Request, key: Key) -> list[Completion]:
        future: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting.append((key, request, future))
        self._begin()
        return await future

    def parties(self, change: int) -> None:
        self._parties += change
        self._begin()

    def close(self) -> None:
        if self._batch is not None:
            self._batch.cancel()

    def _begin(self) -> None:
        if self._batch is None and self._waiting and (self._eager or len(self._waiting) >= self._parties):
            # The task runs in the next iteration of the event loop, after this one's requests have arrived.
            self._batch = asyncio.create_task(self._sampled())

    async def _sampled(self) -> None:
        # Sorted, so that the order in a batch does not depend on arrival.
        batch, self._waiting = sorted(self._waiting, key=lambda pair: pair[0]), []
        if any(future.cancelled() for _, _, future in batch):
            return  # a party was cancelled, because an exception ends all of them
        requests = [request for _, request, _ in batch]
        try:
            sampled = await call_in_caller(lambda: self._sample(requests))
        except Exception as error:
            for _, _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        self._batch = None
        for (_, _, future), completions in zip(batch, sampled, strict=True):
            if not future.done():
                future.set_result(completions)
        self._begin()


def takes_requests(sampler: Sampler) -> bool:
    """Return True if an engine has `async def generate(request, sampling)`."""
    return inspect.iscoroutinefunction(getattr(sampler, "generate", None))


def lanes(sampler: Sampler, sampling: Sampling, count: int = 1, eager: bool = False) -> list[Lane]:
    """Return `count` lanes of an engine.

    An engine with `async def generate(request, sampling)` gets every request immediately. Any other
    engine samples batches with `sample(requests, sampling)`, one batch of one lane at a time.

    Args:
        sampler: the engine.
        sampling: sampling parameters of all requests.
        count: number of lanes.
        eager: see `BatchLane`.
    """
    if takes_requests(sampler):
        return [RequestLane(sampler, sampling)] * count
    return [BatchLane(lambda requests: sampler.sample(requests, sampling), eager) for _ in range(count)]
