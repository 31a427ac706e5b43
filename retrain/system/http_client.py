"""HTTP client for JSON whose calls have a deadline and can be cancelled from another thread."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import ssl
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from retrain.system import event_loop
from retrain.system.masking import masked, secret_from

if TYPE_CHECKING:
    import httpx2

FAILURES = (OSError, ValueError, LookupError, TypeError, ArithmeticError)
"""Exceptions that `Calls` raises if a server is down, hangs or sends an invalid answer."""
_CONNECT_S = 10.0
"""Timeout of a connection attempt, in seconds."""
_MAX_BYTES = 1 << 28
"""Maximum size of an answer in bytes, enough for 4 million sampled tokens with their log-probs."""
# identity: a compressed answer could unpack to more than `_MAX_BYTES`.
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
_SHOWN = 500
"""Maximum number of characters of a failed request's answer that HttpError shows."""
_ADDRESS = re.compile(r"(?P<scheme>https?)://(\[[^\[\]/?#@\s]+\]|[^\[\]/?#@\s:]+)(:(?P<port>[0-9]{1,5}))?/?")
_KEY = re.compile(r"[\x21-\x7e]*")
"""Printable ASCII without spaces: the keys that fit into an HTTP header."""


class HttpError(OSError):
    """Error for an answer whose HTTP status is not 200.

    Attributes:
        code: the HTTP status.
    """

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(f"HTTP {code}: {text}")


class Calls:
    """HTTP client for JSON requests from coroutines (`request`) and from threads (calling the object).

    Each call opens its own connection. It ignores proxy settings of the environment, follows no redirects and keeps no
    cookies. Its errors never show a secret.

    Args:
        seconds: deadline of a call, from its start until the whole answer has arrived. A server that sends one byte
            now and then does not extend it.
        max_bytes: maximum size of an answer.
        key: bearer token for the Authorization header; "" sends no such header.

    Attributes:
        aborted: event that `abort` sets; from then on calls from threads fail.
    """

    def __init__(self, seconds: float, max_bytes: int = _MAX_BYTES, key: str = "") -> None:
        self.seconds = seconds
        self._max_bytes = max_bytes
        self._headers = {**_HEADERS, **({"Authorization": f"Bearer {key}"} if key else {})}
        self.aborted = threading.Event()
        self._pending: dict[Future[Any], str] = {}

    async def request(self, url: str, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> Any:
        """Send a GET request, or a POST request with a JSON body.

        Args:
            url: the address.
            body: sent as JSON in a POST request; None sends a GET request.
            seconds: deadline of this call, in place of that of the object.
        Returns:
            The parsed JSON of the answer, or its text if its Content-Type is not JSON.
        Raises:
            HttpError: the status is not 200.
            TimeoutError: the answer has not arrived by the deadline, or the connection attempt timed out.
            OSError: the connection failed.
            ValueError: the answer is longer than `max_bytes`, a web page or invalid JSON; the request cannot be sent.
        """
        import httpx2

        seconds = self.seconds if seconds is None else seconds
        try:
            # Timeouts of httpx are those of single reads; a server that sends a byte now and then would never meet one.
            async with asyncio.timeout(seconds):
                return await self._send(url, body, httpx2.Timeout(None, connect=_CONNECT_S))
        except httpx2.ConnectTimeout:
            raise TimeoutError(f"no connection within {_CONNECT_S:g} seconds") from None
        except TimeoutError:
            raise TimeoutError(f"no answer within {seconds:g} seconds") from None
        except (httpx2.LocalProtocolError, httpx2.UnsupportedProtocol, httpx2.InvalidURL, UnicodeEncodeError) as error:
            raise ValueError(masked(f"the request cannot be sent: {error}")) from None
        except httpx2.HTTPError as error:
            raise _failure(error) from None

    def __call__(self, url: str, body: Mapping[str, Any] | None = None, seconds: float | None = None) -> Any:
        """Call `request` and wait for its answer. Do not use it in the thread of an event loop.

        Raises:
            ConnectionAbortedError: `abort` was called.
            HttpError, TimeoutError, OSError, ValueError: see `request`.
        """
        call = event_loop.submit(self.request(url, body, seconds))
        self._pending[call] = url
        try:
            if self.aborted.is_set():  # checked afterwards, because `abort` may have missed this call
                call.cancel()
            return call.result()
        except CancelledError:
            raise ConnectionAbortedError("aborted") from None
        finally:
            self._pending.pop(call, None)

    def cancel(self, urls: Iterable[str]) -> None:
        """Cancel the calls to these servers that threads wait for. A server is the beginning of its addresses."""
        servers = tuple(f"{url}/" for url in urls)
        for call, url in list(self._pending.items()):
            if url.startswith(servers):
                call.cancel()

    def abort(self) -> None:
        """Cancel all calls that threads wait for, and make later ones fail."""
        self.aborted.set()
        for call in list(self._pending):
            call.cancel()

    async def _send(self, url: str, body: Mapping[str, Any] | None, timeout: httpx2.Timeout) -> Any:
        import httpx2

        answer = bytearray()
        # A new client per call: a connection from a pool may be stale because the server was restarted.
        async with (
            httpx2.AsyncClient(verify=_tls(), trust_env=False, timeout=timeout) as client,
            client.stream(
                "GET" if body is None else "POST",
                url,
                content=None if body is None else json.dumps(body),
                headers=self._headers,
            ) as response,
        ):
            async for part in response.aiter_raw():
                answer += part
                if len(answer) > self._max_bytes:
                    raise ValueError(f"the answer is longer than {self._max_bytes} bytes")
        text = answer.decode(errors="replace")
        if response.status_code != 200:
            raise HttpError(response.status_code, masked(text)[:_SHOWN])
        kind = response.headers.get("Content-Type", "").partition(";")[0]
        if kind == "text/html":
            raise ValueError("it answers with a web page, so another program or a proxy answers at this address")
        if kind != "application/json":
            return text
        return json.loads(text)


def _failure(error: BaseException) -> OSError:
    """Convert httpx2's error to an OSError without secrets, with the operating system's errno if there is one."""
    shown, cause = masked(str(error) or type(error).__name__), error
    # httpx wraps the system's error several times, and only that has the errno.
    while (deeper := cause.__cause__ or cause.__context__) is not None:
        cause = deeper
    if not isinstance(cause, OSError) or isinstance(cause, ssl.SSLError) or cause.errno is None:
        return ConnectionError(shown)
    return OSError(cause.errno, os.strerror(cause.errno) if cause.errno > 0 else cause.strerror)


@cache
def _tls() -> ssl.SSLContext:
    """Return a TLS context with the system's trusted certificates. It is cached because loading it takes 20 ms."""
    return ssl.create_default_context()


def key_from(variable: str) -> str:
    """Return the API key in an environment variable; "" if `variable` is empty or not set.

    Raises:
        ValueError: the key has a character that is invalid in an HTTP header.
    """
    key = secret_from(variable) if variable else ""
    if not _KEY.fullmatch(key):
        raise ValueError(f"the environment variable {variable} has a character that is invalid in an HTTP header")
    return key


def key_mistakes(variable: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (problem, fix, fatal) for an environment variable that should hold an API key."""
    try:
        if variable and not key_from(variable):
            yield f"the environment variable {variable} is not set", f"export {variable}=...", False
    except ValueError as error:
        yield str(error), "set it to the key alone, without spaces", True


def address_mistakes(urls: Sequence[str], allow_remote: bool) -> Iterator[tuple[int, str, str]]:
    """Yield (index, problem, fix) for every invalid, duplicate or forbidden server address.

    Args:
        urls: the addresses.
        allow_remote: allow addresses that other machines can reach.
    """
    allowed: dict[tuple[str, int], str] = {}
    for index, url in enumerate(urls):
        server = _place(url)
        if server is None:
            yield index, f'"{url}" is not the address of a server', 'write it as "http://127.0.0.1:8000"'
        elif not allow_remote and not is_loopback(url):
            problem = f"{url} can be reached from other machines, and its endpoints that load weights need no password"
            yield index, problem, "use 127.0.0.1, or set allow_remote = true if the network is private"
        elif server in allowed:
            yield index, f'"{url}" and "{allowed[server]}" are the same server', "remove one of the two"
        else:
            allowed[server] = url


def _place(url: str) -> tuple[str, int] | None:
    """Return host and port of a server address; None if the address is invalid."""
    parts = _ADDRESS.fullmatch(url)
    if parts is None or not 0 < (port := int(parts["port"] or (443 if parts["scheme"] == "https" else 80))) < 2**16:
        return None
    try:
        host = urlsplit(url).hostname or ""
    except ValueError:  # the text in brackets is not an IPv6 address
        return None
    return "127.0.0.1" if host == "localhost" else host, port


def address(host: str, port: int) -> str:
    """Return the URL of a server that listens on a host and port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(url: str) -> bool:
    """Return whether an address is reachable only from this machine; False for an invalid address."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
