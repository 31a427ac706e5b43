"""JSON over HTTP, with a deadline for the whole of a call, which can be broken off."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from retrain.system import event_loop
from retrain.system.masking import masked, secret_from

if TYPE_CHECKING:
    import httpx

FAILURES = (OSError, ValueError, KeyError, TypeError)
"""Exceptions that a dead, hanging or confused server causes."""
_CONNECT_S = 10.0
"""A machine that does not take a connection within this time is gone."""
_MAX_BYTES = 1 << 28
"""Longest answer: 4 million sampled tokens with their log-probs."""
_HEADERS = {"Content-Type": "application/json", "Accept-Encoding": "identity", "Connection": "close"}
_SHOWN = 500
"""Characters of a refusal that its error shows."""
_ADDRESS = re.compile(r"(?P<scheme>https?)://(\[[^\[\]/?#@\s]+\]|[^\[\]/?#@\s:]+)(:(?P<port>[0-9]{1,5}))?/?")


_KEY = re.compile(r"[\x21-\x7e]*")


class HttpError(OSError):
    """A server's refusal.

    Attributes:
        code: the HTTP status.
    """

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(f"HTTP {code}: {text}")


class Calls:
    """JSON calls to servers, from coroutines or from threads. No error of a call shows a secret.

    A call has a connection of its own, asks no proxy of the environment, follows no redirect and keeps no cookie.

    Args:
        seconds: until the whole answer of a call must have arrived, counted from its start: a server that sends a
            byte now and then is late as well.
        max_bytes: of an answer.
        key: sent as `Authorization: Bearer`; "" sends none.

    Attributes:
        over: the calls of threads have been broken off, and new ones are refused.
    """

    def __init__(self, seconds: float, max_bytes: int = _MAX_BYTES, key: str = "") -> None:
        self.seconds, self._max_bytes = seconds, max_bytes
        self._headers = {**_HEADERS, **({"Authorization": f"Bearer {key}"} if key else {})}
        self.over = threading.Event()
        self._under_way: set[Future[Any]] = set()

    async def ask(
        self,
        url: str,
        body: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> Any:
        """GET, or POST of a JSON body; return the answer's JSON, or its text where its type is not JSON.

        Args:
            seconds: instead of the deadline of all calls.
        Raises:
            HttpError: the status is not 200.
            TimeoutError: the answer is late.
            OSError: there is no answer.
            ValueError: it is longer than `max_bytes` or not the JSON that it should be, or the request cannot be sent.
        """
        import httpx

        seconds = self.seconds if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._asked(url, body, httpx.Timeout(None, connect=_CONNECT_S))
        except httpx.ConnectTimeout:
            raise TimeoutError(f"no connection within {_CONNECT_S:g} seconds") from None
        except TimeoutError:
            raise TimeoutError(f"no answer within {seconds:g} seconds") from None
        except (httpx.LocalProtocolError, httpx.UnsupportedProtocol, httpx.InvalidURL, UnicodeEncodeError) as error:
            raise ValueError(masked(f"the request cannot be sent: {error}")) from None
        except httpx.HTTPError as error:
            raise _failure(error) from None

    def __call__(
        self,
        url: str,
        body: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> Any:
        """Make the call of `ask` and wait for its answer, in any thread but that of an event loop.

        Raises:
            ConnectionAbortedError: the calls have been broken off. Otherwise as `ask`.
        """
        call = event_loop.submit(self.ask(url, body, seconds))
        self._under_way.add(call)
        try:
            if self.over.is_set():  # asked only now: `break_off` may have missed this call
                call.cancel()
            return call.result()
        except CancelledError:
            raise ConnectionAbortedError("broken off") from None
        finally:
            self._under_way.discard(call)

    def break_off(self) -> None:
        """End every call of a thread, whoever waits for it, and refuse later ones."""
        self.over.set()
        for call in list(self._under_way):
            call.cancel()

    async def _asked(self, url: str, body: Mapping[str, Any] | None, timeout: httpx.Timeout) -> Any:
        import httpx

        answer = bytearray()
        # A connection that is kept could belong to a server that has been started anew since.
        async with (
            httpx.AsyncClient(verify=_tls(), trust_env=False, timeout=timeout) as client,
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
        if not response.headers.get("Content-Type", "").startswith("application/json"):
            return text
        try:
            return json.loads(text)
        except RecursionError:
            raise ValueError("the answer is nested too deeply") from None


def _failure(error: BaseException) -> OSError:
    """Return the system's reason for a lost or refused connection, where there is one, without secrets."""
    shown, cause = masked(str(error) or type(error).__name__), error
    while (deeper := cause.__cause__ or cause.__context__) is not None:
        cause = deeper
    if not isinstance(cause, OSError) or isinstance(cause, ssl.SSLError) or cause.errno is None:
        return ConnectionError(shown)
    return OSError(cause.errno, os.strerror(cause.errno) if cause.errno > 0 else cause.strerror)


@cache
def _tls() -> ssl.SSLContext:
    """Return the system's trusted certificates; loading them takes 20 ms."""
    return ssl.create_default_context()


def key_from(variable: str) -> str:
    """Return the key in an environment variable; "" without a name, or if it is not set.

    Raises:
        ValueError: the key has a character that no HTTP header takes.
    """
    key = secret_from(variable) if variable else ""
    if not _KEY.fullmatch(key):
        raise ValueError(f"the environment variable {variable} has a character that no HTTP header takes")
    return key


def key_mistakes(variable: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (problem, fix, fatal) of an environment variable that is to hold a key."""
    try:
        if variable and not key_from(variable):
            yield f"the environment variable {variable} is not set", f"export {variable}=...", False
    except ValueError as error:
        yield str(error), "set it to the key alone", True


def address_mistakes(urls: Sequence[str], allow_remote: bool) -> Iterator[tuple[int, str, str]]:
    """(index, problem, fix) of every address that is not a server's, occurs twice, or may not be used."""
    known: dict[tuple[str, int], str] = {}
    for index, url in enumerate(urls):
        place = _place(url)
        if place is None:
            yield index, f'"{url}" is not the address of a server', 'write it as "http://127.0.0.1:8000"'
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
    """Return whether only this machine can reach the address; False for an invalid address."""
    try:
        host = urlsplit(url).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
