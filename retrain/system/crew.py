"""Workers that share independent calls: each call under a deadline, and no failure reaches another call."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any, Generic, TypeVar, cast

from retrain.system.worker_process import TimedWorker, WorkerLost

CallT = TypeVar("CallT")
ResultT = TypeVar("ResultT")
_CHUNK = 32


class Crew(ABC, Generic[CallT, ResultT]):
    """Workers of one kind. A call that its worker does not survive gets a result that says so.

    Args:
        size: how many.
        hint: is added to what a worker says that raises when it starts.
    """

    def __init__(self, size: int, hint: str = "") -> None:
        self.size, self._hint = size, hint
        self.workers: list[TimedWorker] = []

    @abstractmethod
    def start(self) -> TimedWorker:
        """A new worker."""

    @abstractmethod
    def read(self, call: CallT, answer: Any) -> ResultT:
        """The result of a call from the answer to it; WorkerLost if that is none."""

    @abstractmethod
    def lost(self, call: CallT, status: str, detail: str) -> ResultT:
        """The result of a call that cost its worker: "timeout" or "crashed", and how in words."""

    def spent(self, result: ResultT) -> bool:
        """Whether the worker that gave this result must be replaced."""
        return False

    def close(self) -> None:
        """Kill the workers. A later call starts new ones."""
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def call_all(self, calls: Sequence[CallT]) -> list[ResultT]:
        """A result for each call; all workers are alive and ready before the first."""
        try:
            for worker in [worker for worker in self.workers if worker.gone()]:
                worker.kill()
                self.workers.remove(worker)
            self.workers += [self.start() for _ in range(self.size - len(self.workers))]
            while not all(worker.ready for worker in self.workers):
                self._receive([], [], deque())
            return self._dispatch(calls)
        except BaseException:
            self.close()  # answers under way must not reach the next call
            raise

    def _dispatch(self, calls: Sequence[CallT]) -> list[ResultT]:
        results: list[ResultT | None] = [None] * len(calls)
        queue = deque(range(len(calls)))
        while queue or any(worker.pending for worker in self.workers):
            for worker in self.workers:
                if worker.ready and not worker.pending and queue:
                    count = max(1, min(_CHUNK, len(queue) // (2 * self.size)))
                    worker.give([(index, calls[index]) for index in (queue.popleft() for _ in range(count))])
            self._receive(calls, results, queue)
        return cast("list[ResultT]", results)

    def _receive(self, calls: Sequence[CallT], results: list[ResultT | None], queue: deque[int]) -> None:
        """Wait for one message or deadline, and act on it."""
        soonest = min(worker.deadline for worker in self.workers)
        heard = wait([worker.fileno() for worker in self.workers], max(0.0, soonest - time.monotonic()))
        for position, worker in enumerate(self.workers):
            failure: tuple[str, str] | None = None
            if worker.fileno() in heard:
                failure = self._take(worker, calls, results)
            elif time.monotonic() >= worker.deadline and not worker.has_answered():  # it may just have done so
                failure = ("timeout", worker.overdue())
            if failure is None:
                continue
            worker.kill()
            if worker.pending and failure[0]:
                index = worker.pending.popleft()
                results[index] = self.lost(calls[index], *failure)
            queue.extendleft(reversed(worker.pending))
            self.workers[position] = self.start()

    def _take(
        self, worker: TimedWorker, calls: Sequence[CallT], results: list[ResultT | None]
    ) -> tuple[str, str] | None:
        """Take a worker's answers; how it failed if it is to be replaced, "" if no call is to blame."""
        try:
            for answer in worker.receive():
                if not worker.ready:
                    worker.started(answer, self._hint)
                    continue
                result = self.read(calls[worker.pending[0]], answer)
                results[worker.answered()] = result
                if self.spent(result):
                    return "", ""
        except WorkerLost as lost:
            # A second answer is the fault of a call that has been answered, not of the one that it is busy with.
            return "" if lost.answered else "crashed", worker.ended(lost)
        return None
