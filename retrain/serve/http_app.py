"""HTTP layer of an endpoint: a starlette application with access control, size limits and timeouts."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrain.system.http_client import address, is_loopback
from retrain.system.masking import masked

_BODY_S = 60.0
"""Seconds in which a whole request must arrive."""
_DISCARDED = 1 << 26
"""Largest number of bytes to read from a refused request; a client reads the answer only after it has sent the body."""
_HELD = 1 << 28
"""Largest total number of bytes of arriving requests that are held in memory."""
_SINGLE = ("authorization", "content-type", "host", "origin", "x-session-id")
"""Headers that this package interprets, and that a request may have once."""
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to

JsonObject = dict[str, Any]
_T = TypeVar("_T")


class RefusedError(Exception):
    """A request is answered with an error.

    Args:
        status: HTTP status code.
        message: text of the error.
        close: True if the connection must be closed.
        field: field of the request that caused the error, if it was one.
        code: OpenAI's name of the error, if it has one.
    """

    def __init__(
        self, status: int, message: str, close: bool = False, *, field: str | None = None, code: str | None = None
    ) -> None:
        self.status, self.close, self.field, self.code = status, close, field, code
        super().__init__(message)

    def json(self) -> JsonObject:
        """Return the error in the format of the OpenAI API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": self.code or self.status}}


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

    def check(self, headers: Headers) -> None:
        """Raise `RefusedError` for a request from a web page, with another host name, or without the key."""
        for name in _SINGLE:
            if len(headers.getlist(name)) > 1:
                raise RefusedError(400, f"the header {name} is given twice", close=True)
        if not self._is_own(f"//{headers.get('host', '')}"):
            raise RefusedError(403, f"the Host header is neither loopback nor {self.host}")
        if "origin" in headers and not self._is_own(headers["origin"].partition(":")[2]):
            raise RefusedError(403, "requests from other web pages are refused")
        given = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if self.key and not hmac.compare_digest(given.encode(), self.key.encode()):
            raise RefusedError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")

    def _is_own(self, place: str) -> bool:
        """Return True if the host of `//host:port` is loopback or the host that the endpoint listens on.

        For an endpoint on all addresses, every IP address and the machine's name are accepted.
        """
        host = ""
        with suppress(ValueError):
            host = urlsplit(place).hostname or ""
        if is_loopback(address(host, 1)) or host == self.host.lower():
            return True
        return self.host in _EVERYWHERE and (_is_address(host) or host == socket.gethostname().lower())


Respond = Callable[[Request], Awaitable[Response]]


class Endpoint(NamedTuple):
    """A path of an application, the method that it needs, and the function that answers."""

    path: str
    method: str
    answer: Respond


def application(endpoints: Sequence[Endpoint], access: Access) -> Starlette:
    """Return a starlette application whose errors have the OpenAI API's format.

    Args:
        endpoints: paths with their functions. A function may raise `RefusedError`; `read_json` reads a body.
        access: access control of all paths.
    """

    def checked(answer: Respond) -> Respond:
        async def respond(request: Request) -> Response:
            access.check(request.headers)
            return await answer(request)

        return respond

    async def refused(_: Request, error: Exception) -> Response:
        assert isinstance(error, RefusedError)
        return JSONResponse(error.json(), error.status, {"connection": "close"} if error.close else None)

    async def failed(_: Request, error: Exception) -> Response:
        found = RefusedError(500, masked(f"the server has failed: {type(error).__name__}: {error}"))
        return JSONResponse(found.json(), 500)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        text = "this path needs another method" if error.status_code == 405 else "there is no such path"
        found = RefusedError(error.status_code, text)
        try:
            access.check(request.headers)
        except RefusedError as no_access:
            found = no_access
        return JSONResponse(found.json(), found.status, error.headers)

    routes = [Route(one.path, checked(one.answer), methods=[one.method]) for one in endpoints]
    handlers: dict[Any, Any] = {RefusedError: refused, HTTPException: unknown, Exception: failed}
    return Starlette(routes=routes, exception_handlers=handlers)


class BodyReader:
    """Reads the JSON bodies of requests.

    Args:
        max_bytes: largest size of a body.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._held = max_bytes, 0

    async def read(self, request: Request) -> JsonObject:
        """Return the JSON object in a request's body; a body that is too long is read, discarded and refused.

        Raises:
            RefusedError: the body is too long, too slow, or not a JSON object, or its media type is not JSON.
        """
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "the Content-Type is not application/json")
        if int(request.headers.get("content-length", 0)) > _DISCARDED:
            raise self._too_long(close=True)
        content = bytearray()
        try:
            async with asyncio.timeout(_BODY_S):
                await self._collect(request, content)
            return await asyncio.to_thread(_json_object, content)
        except TimeoutError:
            raise RefusedError(408, f"the request did not arrive within {_BODY_S:g} seconds", close=True) from None
        except ClientDisconnect:
            raise RefusedError(499, "the connection was closed", close=True) from None
        finally:
            self._held -= len(content)

    async def _collect(self, request: Request, content: bytearray) -> None:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > _DISCARDED:
                raise self._too_long(close=True)
            if size <= self._max_bytes:
                content += part
                self._held += len(part)
            if self._held > _HELD:
                raise RefusedError(503, "too many bytes are arriving at the same time", close=True)
        if size > self._max_bytes:
            raise self._too_long()

    def _too_long(self, close: bool = False) -> RefusedError:
        return too_long(f"the request is longer than {self._max_bytes} bytes", 413, close)


def too_long(text: str, status: int = 400, close: bool = False) -> RefusedError:
    """Return the error for a request that does not fit into the model's context."""
    code = "context_length_exceeded"
    return RefusedError(status, f"{code}: {text}", close, code=code)


async def unless_gone(request: Request, waiting: asyncio.Future[_T]) -> _T:
    """Wait for a result; cancel it if the client closes its connection, or its sending side.

    Raises:
        RefusedError: the client has closed its connection.
    """
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([waiting, gone], return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            return await waiting
        waiting.cancel()
        raise RefusedError(499, "the client has closed its connection")
    finally:
        gone.cancel()


def _json_object(content: bytes | bytearray) -> JsonObject:
    try:
        found = json.loads(content)
        if b"\\ud" in content.lower():  # half of a surrogate pair cannot be tokenized
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedError(400, "the request has text with half of a surrogate pair") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RefusedError(400, "the request is not a JSON object")
    return found


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False
