"""One event loop, in a thread of its own, for everything that waits: worker processes, episodes and requests.

Another thread hands `run` a coroutine and waits for its result. While it waits, it calls the functions that the
coroutine passes to `call_in_caller`. An engine therefore samples in the thread that built it, where signals interrupt
it, and never in the thread of the loop. What works in another thread than the main one looks at a `StopFlag` instead,
for example between two tokens.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Generator, Iterable
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

from retrain.errors import EngineError

T = TypeVar("T")
_Calls = SimpleQueue["Callable[[], None] | None"]

_calls: ContextVar[_Calls] = ContextVar("calls")
"""Functions for the thread that waits for the current task; None once the task has ended."""

_starting = threading.Lock()
_thread = threading.local()


class StopFlag:
    """A flag for the work of a thread, which another thread sets."""

    def __init__(self) -> None:
        self._lock, self._calls = threading.Lock(), list[Callable[[], object]]()
        self.is_set = False

    def set(self) -> None:
        """Let `check_stop` raise in threads that have adopted the flag, and wake those that wait."""
        with self._lock:
            self.is_set = True
            for call in self._calls:
                call()

    def adopt(self) -> None:
        """Make it the flag of the calling thread."""
        _thread.flag = self

    @contextmanager
    def waking(self, call: Callable[[], object]) -> Generator[None]:
        """Call a function when the flag is set inside this block, or at once if it is set already."""
        with self._lock:
            self._calls.append(call)
            if self.is_set:
                call()
        try:
            yield
        finally:
            with self._lock:
                self._calls.remove(call)


def thread_flag() -> StopFlag:
    """Return the flag of the calling thread.

    The main thread adopts none, and gets one that nobody sets: signals interrupt it wherever it is.
    """
    if not hasattr(_thread, "flag"):
        StopFlag().adopt()
    return _thread.flag


def check_stop() -> None:
    """Raise EngineError if the flag of the calling thread is set."""
    if thread_flag().is_set:
        raise EngineError("sampling was interrupted, because the run ends")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in the event loop; return or raise what it does.

    An exception in the calling thread, such as KeyboardInterrupt, cancels the coroutine, and is raised again once the
    coroutine has ended. The thread's stop flag does the same. Of an exception group the first exception is raised,
    because exit codes depend on its class.
    """
    loop, calls, ended = _current_loop(), _Calls(), threading.Event()
    context, tasks = copy_context(), list[asyncio.Task[T]]()
    context.run(_calls.set, calls)

    def end(_: object = None) -> None:
        ended.set()
        calls.put(None)

    def start() -> None:
        tasks.append(loop.create_task(coroutine, context=context))
        tasks[0].add_done_callback(end)

    def stop() -> None:
        if tasks:
            tasks[0].cancel()
        else:  # the exception came before `start` was scheduled
            coroutine.close()
            end()

    try:
        loop.call_soon_threadsafe(start)
        with thread_flag().waking(lambda: calls.put(check_stop)):
            while (call := calls.get()) is not None:
                call()
    except BaseException:
        loop.call_soon_threadsafe(stop)
        # Not the None in `calls`: an exception right after it was taken would leave nothing to wait for.
        ended.wait()
        raise
    try:
        return tasks[0].result()
    except BaseExceptionGroup as group:
        raise _first(group) from None


def submit(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine in the event loop and return a future of its result. Only `run` lets it call its caller."""
    return asyncio.run_coroutine_threadsafe(coroutine, _current_loop())


async def gather(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines together and return their results in order. The first exception cancels the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in coroutines]
    return [task.result() for task in tasks]


async def call_in_caller(function: Callable[[], T]) -> T:
    """Call a function in the thread that waits in `run` for the current task; return or raise what it does."""
    loop = asyncio.get_running_loop()
    found: asyncio.Future[tuple[list[T], Exception | None]] = loop.create_future()

    def answer(results: list[T], error: Exception | None) -> None:
        if not found.done():
            found.set_result((results, error))

    def call() -> None:
        try:
            results, error = [function()], None
        except Exception as raised:
            results, error = [], raised
        loop.call_soon_threadsafe(answer, results, error)

    _calls.get().put(call)
    results, error = await found
    if error is not None:
        raise error
    return results[0]


def _current_loop() -> asyncio.AbstractEventLoop:
    with _starting:
        return _loop(os.getpid())


@cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """The loop of this process; a fork needs another one."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"event loop of {pid}", daemon=True).start()
    return loop


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
