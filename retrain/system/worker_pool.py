"""Worker processes that answer calls, each call under a deadline of its own.

A call is a pickle, from the parent, which is trusted. An answer is a line of JSON, `[number of the call, answer]`,
because what runs in the worker is not trusted. A line that does not answer a call under way ends the worker.
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
_LONGEST_ANSWER = 1 << 20
_CHUNK = 32
"""Independent calls that wait in a busy worker."""
_LOOKS, _LOOK_S = 1000, 0.005
"""Number of looks at the exit code of a process that has closed its pipe, and seconds between them."""
_MOST_IDLE_LOSSES = 5
"""Workers in a row that may be lost without an answer and without a call that is to blame."""


class CallLost(Exception):  # noqa: N818 - not always an error
    """A call has no answer, because its worker has ended or was ended.

    Attributes:
        kind: "timeout" or "crashed".
        guilty: True if this call ended the worker, False if it did not, None if it may have been one of several.
    """

    def __init__(self, kind: str, detail: str, guilty: bool | None) -> None:
        super().__init__(detail)
        self.kind, self.guilty = kind, guilty


@dataclass(eq=False)
class _Call:
    """A call without an answer.

    Attributes:
        parse: turns the answer into the future's result; raises ValueError if the answer is invalid.
        deadline: in the loop's time; None until the worker is busy with the call.
    """

    future: asyncio.Future[Any]
    parse: Callable[[Any], Any]
    deadline: float | None = None


@dataclass
class Usage:
    """Counts of the workers of a pool.

    Attributes:
        calls: made. seconds: that workers were busy, summed over workers.
        idle_losses: workers in a row that were lost without an answer and without a guilty call.
    """

    calls: int = 0
    seconds: float = 0.0
    idle_losses: int = 0


class WorkerConnection(asyncio.Protocol):
    """The parent's end of one worker. The first `at_once` open calls are under way.

    No method raises into the event loop, which would log the exception and close the pipe without telling anyone.

    Attributes:
        ready: the answer to the first call, `hello`.
        lost: why there are no more answers; None while the worker lives.
    """

    def __init__(self, process: WorkerProcess, usage: Usage) -> None:
        self._process, self._usage, self._spec = process, usage, process.spec
        self._loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[Any] = self._loop.create_future()
        start = _Call(self.ready, lambda answer: answer, self._loop.time() + _START_TIMEOUT_S)
        self._open: dict[int, _Call] = {0: start}
        self._numbered, self._sent, self._unsent = 1, 1, list[bytes]()
        self._unread, self._began, self._answered = b"", 0.0, False
        self._timer: asyncio.TimerHandle | None = self._loop.call_at(start.deadline or 0.0, self._look)
        self._failed = False
        self.lost: CallLost | None = None

    @classmethod
    async def start(cls, spec: WorkerSpec, usage: Usage) -> WorkerConnection:
        """Start a process and send it its first call."""
        process = await asyncio.wrap_future(start_worker(spec))
        process.pipe.setblocking(False)
        made = await asyncio.get_running_loop().create_connection(partial(cls, process, usage), sock=process.pipe)
        return made[1]

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.process.pid

    def connection_made(self, transport: Any) -> None:
        """Send the first call."""
        self._transport = transport
        transport.write(pickle.dumps((tuple(self._spec.containment), self._spec.hello)))

    def call(self, body: Any, parse: Callable[[Any], T]) -> asyncio.Future[T]:
        """Make a call. `parse` is applied to the answer as it is read: an answer that it refuses ends the worker."""
        call = _Call(self._loop.create_future(), parse)
        if self.lost is not None:
            _fail(call, CallLost(self.lost.kind, str(self.lost), guilty=False))
            return call.future
        if not self._open:
            self._began = self._loop.time()
        self._open[self._numbered] = call
        self._numbered += 1
        self._usage.calls += 1
        if not self._unsent:  # the calls of one round of the loop are one write
            self._loop.call_soon(self._send)
        self._unsent.append(pickle.dumps(body))
        return call.future

    def _send(self) -> None:
        if self._process.has_closed_pipe():
            self.eof_received()
        if self.lost is None:
            self._transport.write(b"".join(self._unsent))  # what the pipe does not take, the loop writes later
            self._sent = self._numbered
            self._wind()
        self._unsent.clear()

    def _wind(self) -> None:
        """Set the deadlines of calls that the worker has come to. One timer serves all of them."""
        for number, call in islice(self._open.items(), self._spec.at_once):
            if call.deadline is None and number < self._sent:
                call.deadline = self._loop.time() + self._spec.seconds
                if self._timer is None or self._timer.when() > call.deadline:
                    if self._timer is not None:
                        self._timer.cancel()
                    self._timer = self._loop.call_at(call.deadline, self._look)

    def _look(self) -> None:
        """Lose the worker if a deadline has passed. The loop has read what was in the pipe before it calls a timer."""
        now, deadlines = self._loop.time(), {n: call.deadline for n, call in self._open.items() if call.deadline}
        if late := {number for number, deadline in deadlines.items() if deadline <= now}:
            return self._lose("timeout", f"took longer than {self._spec.seconds:g} s", late)
        self._timer = self._loop.call_at(min(deadlines.values()), self._look) if deadlines else None

    def data_received(self, data: bytes) -> None:
        """Take answers. What arrived before an invalid line is still an answer, so that the right call is blamed."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        try:
            if len(self._unread) > _LONGEST_ANSWER:
                raise ValueError("it sent an answer without an end")
            for line in lines:
                self._take(line)
        except _SecondAnswerError as error:  # by an earlier call, unless calls run in threads
            several = self._spec.at_once > 1
            self._lose("crashed", f"ended its process ({error})", None if several else set())
        except Exception as error:
            self._lose("crashed", f"ended its process ({error})")
        else:
            self._wind()

    def _take(self, line: bytes) -> None:
        try:
            number, answer = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            raise ValueError("it sent an invalid answer") from None
        if type(number) is not int or number not in islice(self._open, self._spec.at_once):
            if type(number) is int and 0 < number < self._numbered and number not in self._open:
                raise _SecondAnswerError("it answered a call twice")
            raise ValueError("it sent an answer to no call")
        result = self._open[number].parse(answer)
        call = self._open.pop(number)
        self._answered = self._answered or number > 0
        if number and not self._open:
            self._usage.seconds += self._loop.time() - self._began
        if not call.future.done():  # its caller may have been cancelled
            call.future.set_result(result)

    def eof_received(self) -> None:
        """Send no more calls: they would be blamed for an end that came before them."""
        self.lost = self.lost or CallLost("crashed", "ended its process", guilty=False)

    def connection_lost(self, exc: Exception | None) -> None:
        """Read what a failed write has left unread, and lose the worker."""
        with suppress(OSError):
            while self.lost is None and (rest := self._process.pipe.recv(1 << 16)):
                self.data_received(rest)
        self.eof_received()
        if not self._failed:
            self._explain(_LOOKS)

    def _explain(self, looks: int) -> None:
        """Lose the worker once its exit code is known, or after so many looks."""
        if looks and self._process.process.poll() is None:
            self._loop.call_later(_LOOK_S, self._explain, looks - 1)
        else:
            self._lose("crashed", f"ended its process ({self._process.how_it_ended()})")

    def retire(self) -> None:
        """End the worker without blame; its open calls are to be made again."""
        self._answered = True
        self._lose("crashed", "was ended", set())

    def _lose(self, kind: str, detail: str, late: set[int] | None = None) -> None:
        """End the worker and fail its open calls.

        Args:
            late: the guilty calls, if they are known; None blames those under way.
        """
        if self._failed:
            return
        self._failed, self.lost = True, CallLost(kind, detail, guilty=False)
        under_way = [number for number in islice(self._open, self._spec.at_once) if number < self._sent]
        blamed = True if len(under_way) == 1 else None
        fruitful = self._answered
        for number, call in self._open.items():
            guilty = (blamed if number in under_way else False) if late is None else number in late
            fruitful = fruitful or guilty is not False
            _fail(call, CallLost(kind, detail, guilty))
        self._usage.idle_losses = 0 if fruitful else self._usage.idle_losses + 1
        if self._open and 0 not in self._open:
            self._usage.seconds += self._loop.time() - self._began
        if self._timer is not None:
            self._timer.cancel()
        self._open.clear()
        self._transport.abort()
        self._process.kill()


class _SecondAnswerError(ValueError):
    pass


def _fail(call: _Call, lost: CallLost) -> None:
    if not call.future.done():
        call.future.set_exception(lost)
        call.future.exception()  # mark it as retrieved: its caller may have been cancelled


class WorkerPool:
    """Workers of one kind, each started when it is needed and replaced once it is lost.

    All methods but `close` are for the event loop.

    Attributes:
        size: number of workers for independent calls.
        usage: counts of all workers.
        hello: the rest of the answer to the first call, `["ready", *rest]`.
    """

    def __init__(self, spec: WorkerSpec, size: int) -> None:
        self._spec, self.size, self.usage = spec, size, Usage()
        self._workers: dict[Hashable, asyncio.Task[WorkerConnection]] = {}
        self.hello: Sequence[Any] = ()

    async def start(self) -> None:
        """Start all workers.

        Raises:
            ComponentError: a worker refuses what it is to load.
            UserCodeError: it raises, ends or takes too long as it loads.
        """
        await asyncio.gather(*map(self.worker, range(self.size)))

    async def worker(self, place: Hashable) -> WorkerConnection:
        """Return the live worker of a place. The first caller starts it, and the others wait for the same worker."""
        task = self._workers.get(place)
        if task is not None and task.done() and (task.cancelled() or task.exception() or task.result().lost):
            task = None
        if task is None:
            task = self._workers[place] = asyncio.create_task(self._started())
        # Shielded: a caller that is cancelled must not end the worker of the others.
        return task.result() if task.done() else await asyncio.shield(task)

    async def _started(self) -> WorkerConnection:
        what, usage = self._spec.what, self.usage
        if usage.idle_losses >= _MOST_IDLE_LOSSES:
            raise UserCodeError(f"{what} ended its process {usage.idle_losses} times in a row without answering a call")
        worker = await WorkerConnection.start(self._spec, usage)
        try:
            how, *rest = await worker.ready
        except CallLost as lost:
            if lost.kind == "timeout":
                text = f"loading {what} took longer than {_START_TIMEOUT_S:g} s; look at its imports"
                raise UserCodeError(text) from None
            reason = str(lost).removeprefix("ended its process ")
            raise UserCodeError(f"{what} ended the process that loaded it {reason}") from None
        except asyncio.CancelledError:
            worker.retire()
            raise
        if how == "ready":
            self.hello = rest
            return worker
        worker.retire()
        if how == "refused":
            raise ComponentError(*rest)
        raise UserCodeError(f"loading {what} raised {rest[0]}{self._spec.hint}\n{rest[2]}")

    async def call_all(
        self,
        bodies: Sequence[Any],
        parse: Callable[[int, Any], T],
        spent: Callable[[T], bool] = lambda _: False,
    ) -> list[T | CallLost]:
        """Make independent calls; return the answers in order, and CallLost for each call that ended its worker.

        All workers are ready before the first call. What a lost worker had not begun, another one does.

        Args:
            parse: turns the index of a call and its answer into a result; raises ValueError if the answer is invalid.
            spent: whether the worker that gave this result must be replaced.
        """
        await self.start()
        found: dict[int, T | CallLost] = {}
        queue = deque(range(len(bodies)))

        async def work(place: int) -> None:
            while queue:
                worker = await self.worker(place)
                count = min(len(queue), max(1, min(_CHUNK, len(queue) // (2 * self.size))))
                chunk = [queue.popleft() for _ in range(count)]
                futures = [worker.call(bodies[index], partial(parse, index)) for index in chunk]
                again = list[int]()
                for index, future in zip(chunk, futures, strict=True):
                    try:
                        found[index] = result = await future
                        if spent(result):
                            worker.retire()
                    except CallLost as lost:
                        if lost.guilty is False:
                            again.append(index)
                        else:
                            found[index] = lost
                queue.extendleft(reversed(again))

        async with asyncio.TaskGroup() as group:
            for place in range(self.size):
                group.create_task(work(place))
        return [found[index] for index in range(len(bodies))]

    def release(self, place: Hashable) -> None:
        """End the worker of a place."""
        if (task := self._workers.pop(place, None)) is not None:
            if task.done() and not task.cancelled() and not task.exception():
                task.result().retire()
            task.cancel()

    async def close(self) -> None:
        """End all workers. A later call starts new ones."""
        for place in list(self._workers):
            self.release(place)
