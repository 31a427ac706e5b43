"""HTTP layer of an endpoint: a starlette application with access control and a limit on the size of requests."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrain.system.masking import masked

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ALL_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to

JsonObject = dict[str, Any]
_T = TypeVar("_T")


class RefusedError(Exception):
    """A request is answered with an error.

    Args:
        status: HTTP status code.
        message: text of the error.
        field: field of the request that caused the error, if it was one.
        code: OpenAI's name of the error, if it has one.
    """

    def __init__(self, status: int, message: str, *, field: str | None = None, code: str | None = None) -> None:
        self.status = status
        self.field = field
        self.code = code
        super().__init__(message)

    def answer(self) -> JSONResponse:
        """Return the response in the format of the OpenAI API."""
        return JSONResponse(self.json(), self.status)

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

    @property
    def origins(self) -> set[str]:
        """Hosts from which web pages may send requests."""
        return {*_LOOPBACK, self.host.lower(), socket.gethostname().lower()}

    @property
    def hosts(self) -> list[str]:
        """Hosts that a request may name. An endpoint on all addresses cannot list the names that lead to it."""
        # TrustedHostMiddleware compares an IPv6 address with its brackets.
        names = sorted(f"[{host}]" if ":" in host else host for host in self.origins)
        # Then the key and the Origin are the protection.
        return ["*"] if self.host in _ALL_ADDRESSES else names

    def check(self, headers: Headers) -> None:
        """Raise `RefusedError` for a request from another web page, or without the key."""
        if "origin" in headers and _hostname(headers["origin"]) not in self.origins:
            raise RefusedError(403, "requests from other web pages are refused")
        given = headers.get("authorization", "").removeprefix("Bearer ").strip()
        # Compared in constant time, so that answers' times do not tell how many characters are right.
        if self.key and not hmac.compare_digest(given.encode(), self.key.encode()):
            raise RefusedError(401, "the API key is missing or wrong: send it as Authorization: Bearer KEY")


def _hostname(origin: str) -> str | None:
    try:
        return urlsplit(origin).hostname
    except ValueError:  # brackets around something else than an IPv6 address
        return None


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
        return error.answer()

    async def failed(_: Request, error: Exception) -> Response:
        return RefusedError(500, masked(f"the server has failed: {type(error).__name__}: {error}")).answer()

    async def unknown(_: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        problem = "this path needs another method" if error.status_code == 405 else "there is no such path"
        return RefusedError(error.status_code, problem).answer()

    return Starlette(
        routes=[Route(endpoint.path, checked(endpoint.answer), methods=[endpoint.method]) for endpoint in endpoints],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=access.hosts, www_redirect=False)],
        exception_handlers={RefusedError: refused, HTTPException: unknown, Exception: failed},
    )


async def read_json(request: Request, max_bytes: int) -> JsonObject:
    """Return the JSON object in a request's body.

    A body of more than `max_bytes` is read to its end and discarded: clients read an answer only after they have sent
    the body.

    Raises:
        RefusedError: the body is too long or not a JSON object, or its media type is not JSON.
    """
    # A web page can send other media types without asking the endpoint first.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RefusedError(415, "the Content-Type is not application/json")
    content = bytearray()
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            # The rest is read without being kept, so that memory stays bounded.
            if size <= max_bytes:
                content += part
    except ClientDisconnect:
        raise RefusedError(499, "the connection was closed") from None
    if size > max_bytes:
        raise too_long(f"the request is longer than {max_bytes} bytes", 413)
    # Parsing megabytes would stop all other requests of the loop.
    return await asyncio.to_thread(_json_object, content)


def too_long(problem: str, status: int = 400) -> RefusedError:
    """Return the error for a request that does not fit into the model's context."""
    code = "context_length_exceeded"
    return RefusedError(status, f"{code}: {problem}", code=code)


async def unless_gone(request: Request, waiting: asyncio.Future[_T]) -> _T:
    """Wait for a result; cancel it if the client closes its connection, or its sending side.

    Raises:
        RefusedError: the client has closed its connection.
    """
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait([waiting, gone], return_when=asyncio.FIRST_COMPLETED)
        # The body has been read, so that the next message of the connection can only be its end.
        if not gone.done():
            return await waiting
        waiting.cancel()
        raise RefusedError(499, "the client has closed its connection")
    finally:
        gone.cancel()


def _json_object(content: bytearray) -> JsonObject:
    try:
        body = json.loads(content)
        if b"\\ud" in content.lower():  # half of a surrogate pair cannot be tokenized
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedError(400, "the request has text with half of a surrogate pair") from None
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise RefusedError(400, "the request is not a JSON object")
    return body
