"""Pool of worker processes that answer calls, each with its own deadline.

A call is a pickle, an answer a line of JSON, `[number of the call, answer]`. Only `retrain.system.worker_process` has
the worker's end of the pipe, so that the parent takes every line for such an answer.
"""

from __future__ import annotations

import asyncio
import json
import pickle
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from retrain.errors import ComponentError, UserCodeError
from retrain.system.worker_process import WorkerProcess, WorkerSpec, start_worker

T = TypeVar("T")

_START_TIMEOUT_S = 120.0
_CHUNK = 32
"""Maximum number of independent calls that a worker gets at once."""
_EXIT_POLLS, _EXIT_POLL_S = 1000, 0.005
"""Number of polls for the exit code of a worker whose pipe is closed, and seconds between two polls."""
_MAX_IDLE_LOSSES = 5
"""Maximum number of consecutive workers that are lost before they answer a call, without a guilty call.

After that many no further worker is started.
"""


class CallLost(Exception):  # noqa: N818 - not always an error
    """Raised for a call that gets no answer, because its worker has ended or was killed.

    Attributes:
        kind: "timeout" or "crashed".
        guilty: True if this call caused the end of the worker, False if it did not, None if it is one of several
            possible causes.
    """

    def __init__(self, kind: str, detail: str, guilty: bool | None) -> None:
        super().__init__(detail)
        self.kind = kind
        self.guilty = guilty


@dataclass(eq=False)
class _Call:
    """A call that waits for its answer.

    Attributes:
        future: completed with the answer, or with CallLost.
        deadline: time limit of the call, in the time of the event loop; None until the worker starts the call.
    """

    future: asyncio.Future[Any]
    deadline: float | None = None


@dataclass
class Usage:
    """Usage counters of a pool.

    Attributes:
        calls: number of calls.
        seconds: total time that workers were busy, summed over workers.
        idle_losses: number of consecutive workers that were lost before they answered a call, without a guilty call.
    """

    calls: int = 0
    seconds: float = 0.0
    idle_losses: int = 0


class WorkerConnection(asyncio.Protocol):
    """The parent's end of the pipe to one worker.

    The worker handles up to `WorkerSpec.at_once` calls concurrently, oldest first.

    Attributes:
        ready: future of the answer to the first call, `hello`.
        lost: reason why no more answers will come; None while the worker runs.
    """

    def __init__(self, process: WorkerProcess, usage: Usage) -> None:
        self._process, self._usage, self._spec = process, usage, process.spec
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Any] = self._loop.create_future()
        hello = _Call(self.ready, self._loop.time() + _START_TIMEOUT_S)
        self._open: dict[int, _Call] = {0: hello}
        self._next_number, self._first_unsent, self._unsent = 1, 1, list[bytes]()
        self._unread, self._busy_since, self._has_answered = b"", 0.0, False
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(hello.deadline or 0.0, self._check_deadlines)
        self._ended = False
        self.lost: CallLost | None = None

    @classmethod
    async def start(cls, spec: WorkerSpec, usage: Usage) -> WorkerConnection:
        """Start a worker process and send its first call."""
        process = await asyncio.wrap_future(start_worker(spec))
        process.pipe.setblocking(False)
        factory = partial(cls, process, usage)
        _, connection = await asyncio.get_running_loop().create_connection(factory, sock=process.pipe)
        return connection

    @property
    def pid(self) -> int:
        """PID of the worker process."""
        return self._process.process.pid

    def connection_made(self, transport: Any) -> None:
        """Send the first call."""
        self._transport = transport
        transport.write(pickle.dumps((self._spec.memory_mb, self._spec.seconds, self._spec.hello)))

    def call(self, body: Any) -> asyncio.Future[Any]:
        """Pickle and send a call, and return a future of its answer."""
        call = _Call(self._loop.create_future())
        if self.lost is not None:
            _fail(call, CallLost(self.lost.kind, str(self.lost), guilty=False))
            return call.future
        if not self._open:
            self._busy_since = self._loop.time()
        self._open[self._next_number] = call
        self._next_number += 1
        self._usage.calls += 1
        if not self._unsent:  # all calls of one iteration of the event loop are written together
            self._loop.call_soon(self._send)
        self._unsent.append(pickle.dumps(body))
        return call.future

    def _send(self) -> None:
        if self._process.has_closed_pipe():
            self.eof_received()
        if self.lost is None:
            self._transport.write(b"".join(self._unsent))  # the transport buffers what the pipe does not accept yet
            self._first_unsent = self._next_number
            self._set_deadlines()
        self._unsent.clear()

    def _set_deadlines(self) -> None:
        """Set the deadlines of the calls that the worker has started. All deadlines share one timer."""
        for number, call in islice(self._open.items(), self._spec.at_once):
            if call.deadline is None and number < self._first_unsent:
                call.deadline = self._loop.time() + self._spec.seconds
                if self._timer is None or self._timer.when() > call.deadline:
                    if self._timer is not None:
                        self._timer.cancel()
                    self._timer = self._loop.call_at(call.deadline, self._check_deadlines)

    def _check_deadlines(self) -> None:
        """Kill the worker if a deadline has passed.

        The event loop reads the pipe before it calls a timer, so an answer that arrived in time counts.
        """
        now, deadlines = self._loop.time(), {n: call.deadline for n, call in self._open.items() if call.deadline}
        if late := {number for number, deadline in deadlines.items() if deadline <= now}:
            return self._lose("timeout", f"took longer than {self._spec.seconds:g} s", late)
        self._timer = self._loop.call_at(min(deadlines.values()), self._check_deadlines) if deadlines else None

    def data_received(self, data: bytes) -> None:
        """Complete the calls that are answered, one per line."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            number, answer = json.loads(line)
            call = self._open.pop(number)
            self._has_answered = self._has_answered or number > 0
            if number and not self._open:
                self._usage.seconds += self._loop.time() - self._busy_since
            if not call.future.done():  # the caller may have been cancelled
                call.future.set_result(answer)
        self._set_deadlines()

    def eof_received(self) -> None:
        """Stop sending calls when the worker closes its pipe; a later call must not be blamed for it."""
        self.lost = self.lost or CallLost("crashed", "ended its process", guilty=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """Read the answers that are still in the pipe after a failed write, and kill the worker."""
        with suppress(OSError):
            while self.lost is None and (rest := self._process.pipe.recv(1 << 16)):
                self.data_received(rest)
        self.eof_received()
        if not self._ended:
            self._lose_with_exit_code(_EXIT_POLLS)

    def _lose_with_exit_code(self, polls: int) -> None:
        """Give up the worker once its exit code is known, or after a number of polls."""
        if polls and self._process.process.poll() is None:
            self._loop.call_later(_EXIT_POLL_S, self._lose_with_exit_code, polls - 1)
        else:
            self._lose("crashed", f"ended its process ({self._process.how_it_ended()})")

    def retire(self) -> None:
        """Kill the worker without blaming a call. Its open calls can be repeated in another worker."""
        self._has_answered = True
        self._lose("crashed", "was ended", set())

    def _lose(self, kind: str, detail: str, guilty_calls: set[int] | None = None) -> None:
        """Kill the worker and fail its open calls with CallLost.

        Args:
            kind: "timeout" or "crashed".
            detail: the reason, for errors.
            guilty_calls: numbers of the guilty calls; None blames the calls that the worker was busy with.
        """
        if self._ended:
            return
        self._ended, self.lost = True, CallLost(kind, detail, guilty=False)
        current = [number for number in islice(self._open, self._spec.at_once) if number < self._first_unsent]
        blame = True if len(current) == 1 else None
        idle = not self._has_answered
        for number, call in self._open.items():
            guilty = (blame if number in current else False) if guilty_calls is None else number in guilty_calls
            idle = idle and guilty is False
            _fail(call, CallLost(kind, detail, guilty))
        self._usage.idle_losses = self._usage.idle_losses + 1 if idle else 0
        if self._open and 0 not in self._open:
            self._usage.seconds += self._loop.time() - self._busy_since
        if self._timer is not None:
            self._timer.cancel()
        self._open.clear()
        self._transport.abort()
        self._process.kill()


def _fail(call: _Call, lost: CallLost) -> None:
    if not call.future.done():
        call.future.set_exception(lost)
        call.future.exception()  # mark the exception as retrieved, because the caller may have been cancelled


class WorkerPool:
    """Pool of workers of one kind. A worker is started when it is needed, and replaced when it is lost.

    Call all methods in the event loop's thread.

    Attributes:
        size: number of workers for independent calls.
        usage: counters of all workers.
        hello: `rest` of the answer to the first call, `["ready", *rest]`.
    """

    def __init__(self, spec: WorkerSpec, size: int) -> None:
        self._spec, self.size, self.usage = spec, size, Usage()
        self._workers: dict[Hashable, asyncio.Task[WorkerConnection]] = {}
        self.hello: Sequence[Any] = ()

    async def start(self) -> None:
        """Start all workers.

        Raises:
            ComponentError: a worker rejects the component that it should load.
            UserCodeError: a worker raises, ends or takes too long while it loads the component.
        """
        await asyncio.gather(*map(self.worker, range(self.size)))

    async def worker(self, key: Hashable) -> WorkerConnection:
        """Return the live worker with this key. The first caller starts it; concurrent callers wait for it.

        Raises:
            ComponentError, UserCodeError: see `start`.
        """
        task = self._workers.get(key)
        if task is not None and task.done() and (task.cancelled() or task.exception() or task.result().lost):
            task = None
        if task is None:
            task = self._workers[key] = asyncio.create_task(self._start_one())
        # Shielded, because the cancellation of one caller must not cancel the start for the others.
        return task.result() if task.done() else await asyncio.shield(task)

    async def _start_one(self) -> WorkerConnection:
        what, usage = self._spec.what, self.usage
        if usage.idle_losses >= _MAX_IDLE_LOSSES:
            raise UserCodeError(f"{what} ended its process {usage.idle_losses} times in a row without answering a call")
        worker = await WorkerConnection.start(self._spec, usage)
        try:
            status, *rest = await worker.ready
        except CallLost as lost:
            if lost.kind == "timeout":
                text = f"loading {what} took longer than {_START_TIMEOUT_S:g} s; look at its imports"
                raise UserCodeError(text) from None
            reason = str(lost).removeprefix("ended its process ")
            raise UserCodeError(f"{what} ended the process that loaded it {reason}") from None
        except asyncio.CancelledError:
            worker.retire()
            raise
        if status == "ready":
            self.hello = rest
            return worker
        worker.retire()
        if status == "refused":
            raise ComponentError(*rest)
        raise UserCodeError(f"loading {what} raised {rest[0]}\n{rest[2]}")

    async def call_all(
        self, bodies: Sequence[Any], parse: Callable[[Any], T], spent: Callable[[T], bool] = lambda _: False
    ) -> list[T | CallLost]:
        """Distribute independent calls over the workers.

        All workers are started before the first call. If a worker is lost, another worker (or its replacement) gets
        those of its calls that are not guilty.

        Args:
            bodies: the calls.
            parse: turns an answer into a result.
            spent: returns True for a result after which the worker must be replaced.
        Returns:
            The result of each call in order; CallLost for a call that ended its worker or may have ended it.
        Raises:
            ComponentError, UserCodeError: see `start`.
        """
        await self.start()
        results: dict[int, T | CallLost] = {}
        queue = deque(range(len(bodies)))

        async def work(key: int) -> None:
            while queue:
                worker = await self.worker(key)
                # Fewer as the queue empties, so that no worker is left with many calls while others wait.
                count = min(len(queue), max(1, min(_CHUNK, len(queue) // (2 * self.size))))
                chunk = [queue.popleft() for _ in range(count)]
                futures = [worker.call(bodies[index]) for index in chunk]
                again = list[int]()
                for index, future in zip(chunk, futures, strict=True):
                    try:
                        results[index] = result = parse(await future)
                        if spent(result):
                            worker.retire()
                    except CallLost as lost:
                        if lost.guilty is False:
                            again.append(index)
                        else:
                            results[index] = lost
                # In front, so that a call that was lost does not wait for all others again.
                queue.extendleft(reversed(again))

        async with asyncio.TaskGroup() as group:
            for key in range(self.size):
                group.create_task(work(key))
        return [results[index] for index in range(len(bodies))]

    def release(self, key: Hashable) -> None:
        """Kill the worker with this key, if there is one."""
        if (task := self._workers.pop(key, None)) is not None:
            if task.done() and not task.cancelled() and not task.exception():
                task.result().retire()
            task.cancel()

    async def close(self) -> None:
        """Kill all workers. A later call starts new ones."""
        for key in list(self._workers):
            self.release(key)
