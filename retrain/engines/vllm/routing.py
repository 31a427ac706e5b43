"""Distribution of requests over servers: to the least loaded server, but all turns of an episode to the same one."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from retrain.system import event_loop
from retrain.types import Request

_SESSIONS = 1 << 16
"""Number of sessions whose server is remembered."""
_T = TypeVar("_T")


class Assignment(NamedTuple):
    """The assignment of a request to a server.

    Attributes:
        url: address of the server.
        joined: a number that the server got when it became usable; a server that becomes usable again gets a new one.
        size: number of completions of the request.
    """

    url: str
    joined: int
    size: int


class Router:
    """Assigns requests to the usable servers.

    A request of a session goes to the server of the session's last request, which has cached its
    context, if that server is usable and has a free slot. Any other request goes to the server with
    the fewest completions in flight. If no usable server has a free slot, requests wait in order.

    `join`, `distrust` and `drop` may be called in any thread, all other methods only in the event loop.

    Args:
        limit: largest number of completions in flight on one server; a single request may have more.

    Attributes:
        waited: number of requests that had to wait for a slot.
    """

    def __init__(self, urls: Sequence[str], limit: int) -> None:
        self._limit, self.waited = limit, 0
        self._lock, self._joins = threading.Lock(), 0
        self._usable: dict[str, int] = {}
        self._load, self._sent = dict.fromkeys(urls, 0), dict.fromkeys(urls, 0)
        self._sessions: OrderedDict[int, str] = OrderedDict()
        self._waiting: deque[tuple[asyncio.Future[Assignment | None], Request]] = deque()
        self._calls: dict[asyncio.Future[Any], Assignment] = {}

    @property
    def usable(self) -> list[str]:
        """Addresses of the usable servers."""
        return [url for url in self._load if url in self._usable]

    @property
    def busy(self) -> bool:
        """True while requests are in flight or wait for a server."""
        return bool(self._calls or self._waiting)

    def join(self, urls: Iterable[str]) -> None:
        """Make servers usable. Requests in flight are not affected."""
        with self._lock:
            for url in urls:
                if url not in self._usable:
                    self._joins += 1
                    self._usable[url] = self._joins
        event_loop.submit(self._refresh(None))

    def distrust(self, failed: Assignment) -> None:
        """Exclude the server of a failed request, unless it has become usable again since.

        The server's other requests continue, because their answers may be valid.
        """
        with self._lock:
            if failed.joined == self._usable.get(failed.url):
                del self._usable[failed.url]
        event_loop.submit(self._refresh(None))

    def drop(self, url: str) -> None:
        """Exclude a server; its requests fail with ConnectionError."""
        with self._lock:
            self._usable.pop(url, None)
        event_loop.submit(self._refresh(url))

    async def assign(self, request: Request) -> Assignment | None:
        """Wait for a server with a free slot; None if no server is usable."""
        if not self._waiting and ((server := self._choose(request)) is not None or not self._usable):
            return server
        future: asyncio.Future[Assignment | None] = asyncio.get_running_loop().create_future()
        self._waiting.append((future, request))
        self.waited += 1
        try:
            return await future
        except asyncio.CancelledError:
            # The slot was granted in the moment in which the caller gave up.
            if not future.cancelled() and (assigned := future.result()) is not None:
                self._release(assigned)
            raise

    async def run(self, assigned: Assignment, call: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a request's call, and give its slot to the next request.

        Raises:
            ConnectionError: the server was dropped during the call.
        """
        task = asyncio.ensure_future(call)
        self._calls[task] = assigned
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            # Cancelled by the caller, and not by `drop`.
            if caller is not None and caller.cancelling():
                raise
            raise ConnectionError("the server was dropped while it worked on the request") from None
        finally:
            del self._calls[task]
            self._release(assigned)

    def _choose(self, request: Request) -> Assignment | None:
        """Return the best server with a free slot, and count the request as in flight there."""
        urls = [url for url in self.usable if self._load[url] + request.count <= max(self._limit, request.count)]
        if not urls:
            return None
        # Of equally loaded servers, the one that got less so far: otherwise the first would get every lone request.
        url = min(urls, key=lambda url: (self._load[url], self._sent[url]))
        if request.session is not None:
            if (last := self._sessions.pop(request.session, url)) in urls:
                url = last
            self._sessions[request.session] = url
            if len(self._sessions) > _SESSIONS:
                # The session that was used longest ago has probably ended.
                self._sessions.popitem(last=False)
        self._load[url] += request.count
        self._sent[url] += request.count
        return Assignment(url, self._usable.get(url, 0), request.count)

    def _release(self, assigned: Assignment) -> None:
        self._load[assigned.url] -= assigned.size
        self._dispatch()

    def _dispatch(self) -> None:
        """Assign waiting requests, in the order in which they arrived."""
        while self._waiting:
            future, request = self._waiting[0]
            if not future.done():
                server = self._choose(request)
                if server is None and self._usable:
                    return
                future.set_result(server)
            self._waiting.popleft()

    async def _refresh(self, dropped: str | None) -> None:
        """End the calls to a server that has been dropped, and assign waiting requests."""
        for call, assigned in list(self._calls.items()):
            if assigned.url == dropped and assigned.joined != self._usable.get(dropped or ""):
                call.cancel()
        self._dispatch()
