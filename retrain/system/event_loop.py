"""One event loop in its own thread, for everything that waits: worker processes, episodes and requests.

Another thread passes a coroutine to `run` and waits for its result. While it waits, it calls the functions that the
coroutine passes to `call_in_caller`. An engine therefore samples in the thread that built it, where signals interrupt
it, and never in the thread of the loop. Signals do not interrupt other threads than the main one, so their code checks
a `StopFlag` instead, for example between two tokens.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import cache
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from retrain.errors import EngineError

T = TypeVar("T")
_Calls = SimpleQueue["Callable[[], None] | None"]

_caller_queue: ContextVar[_Calls] = ContextVar("calls")
"""Queue of functions for the thread that waits in `run` for the current task. None marks the end of the task."""

_LOOK_S = 0.5
"""Longest wait of a thread at once, in seconds. Python handles a signal that arrives just before a wait after it."""

_starting = threading.Lock()
_thread = threading.local()
"""Holds the `StopFlag` of each thread."""


class StopFlag:
    """Flag by which one thread asks another to stop its work.

    Attributes:
        is_set: True once the other thread should stop.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wake_calls: list[Callable[[], object]] = []
        self.is_set = False

    def set(self) -> None:
        """Make `check_stop` raise in threads that have adopted the flag, and wake those that wait in `waking`."""
        with self._lock:
            self.is_set = True
            for call in self._wake_calls:
                call()

    def adopt(self) -> None:
        """Make this the flag of the calling thread."""
        _thread.flag = self

    @contextmanager
    def waking(self, call: Callable[[], object]) -> Generator[None]:
        """Call a function when the flag is set inside this block, or at once if it is set already."""
        with self._lock:
            self._wake_calls.append(call)
            if self.is_set:
                call()
        try:
            yield
        finally:
            with self._lock:
                self._wake_calls.remove(call)


def thread_flag() -> StopFlag:
    """Return the flag of the calling thread; a new one if it has not adopted any.

    The main thread adopts no flag, because signals interrupt it.
    """
    if not hasattr(_thread, "flag"):
        StopFlag().adopt()
    return _thread.flag


def check_stop() -> None:
    """Raise EngineError if the flag of the calling thread is set."""
    if thread_flag().is_set:
        raise EngineError("sampling was interrupted, because the run ends")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the event loop, wait for it, and return its result or raise its exception.

    An exception in the calling thread, such as KeyboardInterrupt, cancels the coroutine, and is raised again once the
    coroutine has ended. So does the EngineError of the thread's stop flag. If the coroutine raises an exception group,
    its first exception is raised, because the exit code of the program depends on the class of the exception.
    """
    loop = _current_loop()
    calls = _Calls()
    ended = threading.Event()
    # A context of its own: `call_in_caller` finds the queue of this call, also from tasks that the coroutine starts.
    context = copy_context()
    tasks: list[asyncio.Task[T]] = []
    context.run(_caller_queue.set, calls)

    def end(_: object = None) -> None:
        ended.set()
        calls.put(None)

    def start() -> None:
        tasks.append(loop.create_task(coroutine, context=context))
        tasks[0].add_done_callback(end)

    def stop() -> None:
        if tasks:
            tasks[0].cancel()
        else:  # the exception was raised before `start` was scheduled
            coroutine.close()
            end()

    try:
        loop.call_soon_threadsafe(start)
        with thread_flag().waking(lambda: calls.put(check_stop)):
            while (call := _next(calls)) is not None:
                call()
    except BaseException:
        loop.call_soon_threadsafe(stop)
        # Do not wait for the None in `calls`, which the loop above may have taken just before the exception.
        ended.wait()
        raise
    try:
        return tasks[0].result()
    except BaseExceptionGroup as group:
        raise _first(group) from None


def _next(calls: _Calls) -> Callable[[], None] | None:
    while True:
        with suppress(Empty):
            return calls.get(timeout=_LOOK_S)


def wait_for(future: Future[T]) -> T:
    """Wait for a future in the main thread, where signals must interrupt the wait, and return its result."""
    while wait([future], _LOOK_S).not_done:
        pass
    return future.result()


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine in the event loop and return a future of its result.

    The coroutine must not use `call_in_caller`, because no thread waits in `run` for it.
    """
    return asyncio.run_coroutine_threadsafe(coroutine, _current_loop())


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently and return their results in order. The first exception cancels the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine) for coroutine in coroutines]
    return [task.result() for task in tasks]


async def call_in_caller(function: Callable[[], T]) -> T:
    """Call a function in the thread that waits in `run` for the current task; return its result or raise its exception.

    BaseExceptions that are not Exceptions, such as KeyboardInterrupt, are raised in that thread instead.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[list[T], Exception | None]] = loop.create_future()

    def answer(results: list[T], error: Exception | None) -> None:
        # The coroutine may have been cancelled while the function ran.
        if not future.done():
            future.set_result((results, error))

    def call() -> None:
        try:
            results, error = [function()], None
        except Exception as raised:
            results, error = [], raised
        loop.call_soon_threadsafe(answer, results, error)

    _caller_queue.get().put(call)
    results, error = await future
    if error is not None:
        raise error
    return results[0]


def _current_loop() -> asyncio.AbstractEventLoop:
    # Two threads that start the loop at once would get two.
    with _starting:
        return _loop(os.getpid())


@cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Return the event loop of the process with this PID. A fork has no thread for its parent's loop."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"event loop of {pid}", daemon=True).start()
    return loop


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
