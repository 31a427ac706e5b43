"""Processes that share some rewards: each call under a deadline, and no failure reaches another call."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, cast

from retrain.rewards.worker import Reply, Settings, evaluate, invalid, load
from retrain.system.worker_process import Containment, TimedWorker, WorkerLost

LOOSEN = "rewards run without network and home directory: [reward_pool] sandbox and readable change that"
_CHUNK = 32
_GRACE_S = 5.0
"""What a worker gets beyond the deadline of coroutines, which it keeps itself."""
_LONGEST = 4000
"""Characters of a worker's message."""

Call = tuple[int, Sequence[Mapping[str, Any]]]
"""(number of the reward among those of the crew, the completions that it scores at once)."""


class Crew:
    """Workers that have loaded the same rewards.

    Args:
        settings: what they load, and the seconds of one call.
        containment: what they are kept from. env: names of variables that they see besides the usual ones.
        size: how many; 0 calls the rewards right here, unprotected.
    """

    def __init__(self, settings: Settings, containment: Containment, env: Sequence[str], size: int) -> None:
        self.settings, self.size = settings, size
        self.containment, self._env = containment, env
        self._local = [load(*reward, settings) for reward in settings.rewards] if size == 0 else []
        self.workers: list[_Worker] = []

    def close(self) -> None:
        """Kill the workers. A later call starts new ones."""
        for worker in self.workers:
            worker.kill()
        self.workers = []

    def call_all(self, calls: Sequence[Call]) -> list[list[Reply]]:
        """A reply for each completion of each call; all workers are alive and ready before the first call."""
        if self.size == 0:
            return [_spread(evaluate(self._local[number], items), len(items)) for number, items in calls]
        try:
            for worker in [worker for worker in self.workers if worker.gone()]:
                worker.kill()
                self.workers.remove(worker)
            self.workers += [self._worker() for _ in range(self.size - len(self.workers))]
            while not all(worker.ready for worker in self.workers):
                self._receive([], [], deque())
            return self._dispatch(calls)
        except BaseException:
            self.close()  # replies under way must not reach the next call
            raise

    def _worker(self) -> _Worker:
        return _Worker(self.settings, self.containment, self._env)

    def _dispatch(self, calls: Sequence[Call]) -> list[list[Reply]]:
        replies: list[list[Reply] | None] = [None] * len(calls)
        queue = deque(range(len(calls)))
        while queue or any(worker.pending for worker in self.workers):
            for worker in self.workers:
                if worker.ready and not worker.pending and queue:
                    count = max(1, min(_CHUNK, len(queue) // (2 * self.size)))
                    worker.give([(index, calls[index]) for index in (queue.popleft() for _ in range(count))])
            self._receive(calls, replies, queue)
        return cast("list[list[Reply]]", replies)

    def _receive(self, calls: Sequence[Call], replies: list[list[Reply] | None], queue: deque[int]) -> None:
        """Wait for one message or deadline, and act on it."""
        soonest = min(worker.deadline for worker in self.workers)
        heard = wait([worker.fileno() for worker in self.workers], max(0.0, soonest - time.monotonic()))
        for position, worker in enumerate(self.workers):
            failure: Reply | None = None
            if worker.fileno() in heard:
                failure = worker.take(calls, replies)
            elif time.monotonic() >= worker.deadline and not worker.has_answered():  # it may just have done so
                failure = Reply("timeout", detail=worker.overdue())
            if failure is None:
                continue
            worker.kill()
            if worker.pending and failure.status != "retired":
                index = worker.pending.popleft()
                number, items = calls[index]
                failure = failure._replace(detail=f"{self.settings.rewards[number][0]} {failure.detail}")
                replies[index] = [failure] * len(items)
            queue.extendleft(reversed(worker.pending))
            self.workers[position] = self._worker()


class _Worker(TimedWorker):
    """One worker; its calls are named by their index."""

    def __init__(self, settings: Settings, containment: Containment, variables: Sequence[str]) -> None:
        seconds = settings.timeout_s + (_GRACE_S if settings.later else 0.0)
        super().__init__("a reward", "retrain.rewards.worker", tuple(settings), containment, variables, seconds)
        self._hint = f" ({LOOSEN})" if containment.sandboxed else ""
        self._names = [name for name, *_ in settings.rewards]

    def take(self, calls: Sequence[Call], replies: list[list[Reply] | None]) -> Reply | None:
        """Take its answers; a failure to pass on if it is gone or must go."""
        try:
            for answer in self.receive():
                if not self.ready:
                    self.started(answer, self._hint)
                    continue
                number, items = calls[self.pending[0]]
                found = _replies(answer, self._names[number], len(items))
                replies[self.answered()] = found
                if any(reply.status == "error" and "MemoryError" in reply.detail for reply in found):
                    return Reply("retired")  # what fills its memory may be its own garbage
        except WorkerLost as lost:
            # A second answer is the fault of a call that has been answered, not of the one that it is busy with.
            return Reply("retired" if lost.answered else "crashed", detail=self.ended(lost))
        return None


def _replies(answer: Any, name: str, count: int) -> list[Reply]:
    """A worker's answer as one reply for each of `count` completions; WorkerLost if it is not that."""
    found = _spread([_reply(one, name) for one in answer] if isinstance(answer, list) else [], count)
    if len(found) != count:
        raise WorkerLost("it sent what is no reply")
    return found


def _spread(found: list[Reply], count: int) -> list[Reply]:
    """A failure of a whole call is one of each completion."""
    return found * count if len(found) == 1 and found[0].status != "ok" else found


def _reply(answer: Any, name: str) -> Reply:
    """One answer as a reply; WorkerLost if it is not one. What runs in the worker may have written it."""
    match answer:
        case ["ok", None | float() as value, dict() as parts, "", ""] if all(
            type(one) is float for one in parts.values()
        ):
            finite = all(math.isfinite(one) for one in (value or 0.0, *parts.values()))
            return Reply("ok", value, parts) if finite else invalid(name, {**parts, "score": value} if parts else value)
        case [("error" | "invalid" | "timeout") as status, None, {}, str(detail), str(trace)]:
            return Reply(status, detail=detail[:_LONGEST], trace=trace[-_LONGEST:])
        case _:
            raise WorkerLost("it sent what is no reply")
