"""HTTP layer of an endpoint as an ASGI application: access control, size limits and timeouts."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from retrain.system.http_client import address, is_loopback

_BODY_S = 60.0
"""Seconds in which a whole request must arrive."""
_DISCARDED = 1 << 26
"""Largest number of bytes to read from a refused request; a client reads the answer only after it has sent the body."""
_HELD = 1 << 28
"""Largest total number of bytes of arriving requests that are held in memory."""
_LONGEST_NAME = 256
"""Largest number of characters of a session's name."""
_READ = frozenset({b"authorization", b"content-length", b"content-type", b"host", b"origin", b"x-session-id"})
"""Headers that this module interprets."""
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to

JsonObject = dict[str, Any]
_Receive = Callable[[], Awaitable[Mapping[str, Any]]]
_Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class RefusedError(Exception):
    """A request is answered with an error.

    Args:
        status: HTTP status code.
        message: text of the error.
        close: True if the connection must be closed.
    """

    def __init__(self, status: int, message: str, close: bool = False) -> None:
        self.status, self.close = status, close
        super().__init__(message)

    def json(self) -> JsonObject:
        """Return the error in the format of the OpenAI API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "code": self.status}}


@dataclass(frozen=True)
class Access:
    """The address of an endpoint, and access control for its requests.

    A web page in a browser on this machine can send requests to the endpoint; they are refused because of their
    `Origin` or media type. The page's own host name can also resolve to this machine (DNS rebinding); such requests are
    refused because of their `Host`.

    Attributes:
        host: name or address to listen on.
        port: port to listen on; 0: any free port.
        key: API key that `Authorization: Bearer` must contain; "": no key is needed.
    """

    host: str
    port: int = 0
    key: str = ""

    def check(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `RefusedError` for a request from a web page, with another host name, or without the key."""
        if not self._is_own(b"//" + headers.get(b"host", b"")):
            raise RefusedError(403, f"the Host header is neither loopback nor {self.host}")
        if b"origin" in headers and not self._is_own(headers[b"origin"].partition(b":")[2]):
            raise RefusedError(403, "requests from other web pages are refused")
        given = headers.get(b"authorization", b"").removeprefix(b"Bearer ").strip()
        if self.key and not hmac.compare_digest(given, self.key.encode()):
            raise RefusedError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")

    def _is_own(self, place: bytes) -> bool:
        """Return True if the host of `//host:port` is loopback or the host that the endpoint listens on.

        For an endpoint on all addresses, every IP address and the machine's name are accepted.
        """
        host = ""
        with suppress(ValueError):
            host = urlsplit(place.decode("latin-1")).hostname or ""
        if is_loopback(address(host, 1)) or host == self.host.lower():
            return True
        return self.host in _EVERYWHERE and (_is_address(host) or host == socket.gethostname().lower())


class HttpCall(NamedTuple):
    """A request that has arrived.

    Attributes:
        path: decoded path without the query.
        session: value of the header X-Session-ID, or "".
        body: JSON body; {} for a GET.
        gone: future that is done once the client has closed its connection, or its sending side.
    """

    path: str
    session: str
    body: JsonObject
    gone: asyncio.Future[Any]


class HttpApp:
    """An ASGI application that answers JSON with JSON.

    Args:
        answer: returns the answer to a call, or raises `RefusedError`. The answer is dropped if the client is gone.
        method: returns the HTTP method of a path, or "" for an unknown path.
        access: access control.
        max_bytes: largest size of a request's body.
    """

    def __init__(
        self,
        answer: Callable[[HttpCall], Awaitable[JsonObject]],
        method: Callable[[str], str],
        access: Access,
        max_bytes: int,
    ) -> None:
        self._answer, self._method, self._access, self._max_bytes = answer, method, access, max_bytes
        self._held = 0

    async def __call__(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        """Answer one request."""
        close = False
        try:
            status, found = 200, await self._answered(scope, _single(scope["headers"]), receive)
        except RefusedError as error:
            status, found, close = error.status, error.json(), error.close
        content = json.dumps(found).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
        headers += [(b"connection", b"close")] if close else []
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _answered(
        self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes], receive: _Receive
    ) -> JsonObject:
        """Return the answer to a request. A refused request is read first, unless its connection must be closed."""
        refusal = None
        try:
            self._check(scope, headers)
        except RefusedError as error:
            if error.close:
                raise
            refusal = error
        body = await self._body(receive, 0 if refusal else self._max_bytes)
        if refusal:
            raise refusal
        try:
            session = headers.get(b"x-session-id", b"").decode()
        except UnicodeDecodeError:
            raise RefusedError(400, "X-Session-ID is not UTF-8") from None
        if len(session) > _LONGEST_NAME:
            raise RefusedError(400, f"X-Session-ID is longer than {_LONGEST_NAME} characters")
        gone = asyncio.ensure_future(receive())
        try:
            return await self._answer(HttpCall(scope["path"], session, body, gone))
        finally:
            gone.cancel()

    def _check(self, scope: Mapping[str, Any], headers: Mapping[bytes, bytes]) -> None:
        """Raise `RefusedError` for a request that is refused because of its headers, path or method."""
        if int(headers.get(b"content-length", 0)) > _DISCARDED:
            raise self._too_long(close=True)
        has_body = {b"content-length", b"transfer-encoding"} & {*headers}
        if len(has_body) > 1:  # servers and proxies disagree about the end of such a request
            raise RefusedError(400, "Content-Length and Transfer-Encoding exclude each other", close=True)
        if scope["method"] != "POST" and has_body:
            raise RefusedError(400, f"a {scope['method']} must have no body", close=True)
        self._access.check(headers)
        method = self._method(scope["path"])
        if method != scope["method"]:
            raise (
                RefusedError(405, f"this path needs the method {method}")
                if method
                else RefusedError(404, "there is no such path")
            )
        media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if method == "POST" and media != b"application/json":
            raise RefusedError(415, "the Content-Type is not application/json")

    async def _body(self, receive: _Receive, max_bytes: int) -> JsonObject:
        """Return the JSON body of a request; a body longer than `max_bytes` is read, discarded and refused."""
        content, size, more = bytearray(), 0, True
        try:
            async with asyncio.timeout(_BODY_S):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RefusedError(499, "the connection was closed", close=True)
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size > _DISCARDED:
                        raise self._too_long(close=True)
                    if size <= max_bytes:
                        content += part
                        self._held += len(part)
                    if self._held > _HELD:
                        raise RefusedError(503, "too many bytes are arriving at the same time", close=True)
            if size > max_bytes > 0:
                raise self._too_long()
            return {} if not content else await asyncio.to_thread(_json_object, content)
        except TimeoutError:
            raise RefusedError(408, f"the request did not arrive within {_BODY_S:g} seconds", close=True) from None
        finally:
            self._held -= len(content)

    def _too_long(self, close: bool = False) -> RefusedError:
        return RefusedError(413, f"context_length_exceeded: the request is longer than {self._max_bytes} bytes", close)


def _single(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return headers by name; `RefusedError` if one of `_READ` is given twice."""
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _READ and name in found:
            raise RefusedError(400, f"the header {name.decode('latin-1')} is given twice", close=True)
        found[name] = value
    return found


def _json_object(content: bytes | bytearray) -> JsonObject:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RefusedError(400, "the request is not a JSON object")
    return found


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
