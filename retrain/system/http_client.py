"""JSON over HTTP, with a deadline for the whole of a call, which can be broken off."""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

FAILURES = (OSError, HTTPException, ValueError, KeyError, TypeError)
"""What a dead, hanging or confused server shows as."""
_CONNECT_S = 10.0
"""A machine that does not take a connection within this time is gone."""
_ADDRESS = re.compile(r"(?P<scheme>https?)://(\[[^\[\]/?#@\s]+\]|[^\[\]/?#@\s:]+)(:(?P<port>[0-9]{1,5}))?/?")


class HttpError(OSError):
    """A server's refusal.

    Attributes:
        code: the HTTP status.
    """

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(f"HTTP {code}: {text}")


class Calls:
    """JSON calls of several threads to servers, all of which any thread can break off.

    Args:
        seconds: until the whole answer of a call must have arrived, counted from its start: a server that sends a
            byte now and then is late as well.

    Attributes:
        over: they have been broken off, and new ones are refused.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.over = threading.Event()
        self._under_way: set[socket.socket] = set()
        self._lock = threading.Lock()

    def __call__(
        self,
        url: str,
        body: Mapping[str, Any] | None = None,
        seconds: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """GET, or POST of a JSON body; the answer's JSON, or its text where its type is not JSON.

        Asks no proxy of the environment and follows no redirect.

        Args:
            seconds: instead of the deadline of all calls. headers: of a POST, besides its type.
        Raises:
            HttpError: the status is not 200. Any other of FAILURES: there is no answer, or broken JSON in it.
        """
        seconds = self.seconds if seconds is None else seconds
        parts = urlsplit(url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=min(seconds, _CONNECT_S))
        path = url.partition(parts.netloc)[2] or "/"
        with closing(connection), self._connected(connection, seconds):
            if body is None:
                connection.request("GET", path)
            else:
                connection.request(
                    "POST", path, json.dumps(body), {**(headers or {}), "Content-Type": "application/json"}
                )
            response = connection.getresponse()
            content, answer = response.getheader("Content-Type", ""), response.read()
        if response.status != 200:
            raise HttpError(response.status, answer[:500].decode(errors="replace"))
        return json.loads(answer) if content.startswith("application/json") else answer.decode(errors="replace")

    def break_off(self) -> None:
        """End every call under way, whoever waits for it, and refuse later ones."""
        self.over.set()
        with self._lock:
            for connected in self._under_way:
                _cut(connected)

    @contextmanager
    def _connected(self, connection: HTTPConnection, seconds: float) -> Generator[None]:
        """A block that has the connection, and fails when its time is up or the calls are broken off."""
        began, late = time.monotonic(), threading.Event()
        try:
            connection.connect()
        except TimeoutError:
            raise TimeoutError(f"no connection within {connection.timeout:g} seconds") from None
        connected = connection.sock  # the connection itself lets go of its socket before the answer has been read
        connected.settimeout(seconds)

        def expire() -> None:
            late.set()
            _cut(connected)

        # The socket's own timeout starts anew with every byte; only another thread can end the whole.
        watch = threading.Timer(began + seconds - time.monotonic(), expire)
        watch.daemon = True
        watch.start()
        with self._lock:
            self._under_way.add(connected)
        try:
            if self.over.is_set():  # asked only now: `break_off` may have missed this call
                raise ConnectionAbortedError("broken off")
            yield
        except FAILURES as error:
            if late.is_set() or isinstance(error, TimeoutError):
                raise TimeoutError(f"no answer within {seconds:g} seconds") from None
            raise
        finally:
            watch.cancel()
            with self._lock:
                self._under_way.discard(connected)


def _cut(connected: socket.socket) -> None:
    """End a connection under whoever waits for it."""
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def address_mistakes(urls: Sequence[str], allow_remote: bool) -> Iterator[tuple[int, str, str]]:
    """(index, problem, fix) of every address that is not a server's, occurs twice, or may not be used."""
    known: dict[tuple[str, int], str] = {}
    for index, url in enumerate(urls):
        place = _place(url)
        if place is None:
            yield index, f'"{url}" is no address of a server', 'write it as "http://127.0.0.1:8000"'
        elif not allow_remote and not is_loopback(url):
            problem = (
                f"{url} can be reached from other machines, and its endpoints that load weights ask for no password"
            )
            yield index, problem, "use 127.0.0.1, or set allow_remote = true if the network is private"
        elif place in known:
            yield index, f'"{url}" and "{known[place]}" are one server', "remove one of the two"
        else:
            known[place] = url


def _place(url: str) -> tuple[str, int] | None:
    """(host, port) that an address names; None if it is not that of a server."""
    found = _ADDRESS.fullmatch(url)
    if found is None or not 0 < (port := int(found["port"] or (443 if found["scheme"] == "https" else 80))) < 2**16:
        return None
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:  # no address of IPv6 in its brackets
        return None
    return "127.0.0.1" if host == "localhost" else host, port


def address(host: str, port: int) -> str:
    """That of a server which listens there."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(url: str) -> bool:
    """Whether nobody but this machine can reach the address; what is no address is not."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
