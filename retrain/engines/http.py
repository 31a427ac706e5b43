"""JSON over HTTP, with a deadline for the whole of a call."""

from __future__ import annotations

import ipaddress
import json
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

FAILURES = (OSError, HTTPException, ValueError, KeyError, TypeError)
"""What a dead, hanging or confused server shows as."""


class HttpError(OSError):
    """A server's refusal.

    Attributes:
        code: the HTTP status.
    """

    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(f"HTTP {code}: {text}")


def call(url: str, body: Mapping[str, Any] | None, seconds: float) -> Any:
    """GET, or POST of a JSON body; the answer's JSON, or its text where it does not say that it is JSON.

    No proxy of the environment is asked, no redirect followed.

    Args:
        seconds: until the whole answer must have arrived: a server that sends a byte now and then is late as well.
    Raises:
        HttpError: the status is not 200. Any other of FAILURES: there is no answer, or broken JSON in it.
    """
    address = urlsplit(url)
    kind = HTTPSConnection if address.scheme == "https" else HTTPConnection
    connection = kind(address.hostname or "", address.port, timeout=seconds)
    late = threading.Event()
    try:
        connection.connect()
        watch = threading.Timer(seconds, _cut, [connection.sock, late])
        watch.daemon = True
        watch.start()
        try:
            code, content, text = _exchange(connection, url.partition(address.netloc)[2] or "/", body)
        finally:
            watch.cancel()
    except FAILURES as error:
        if late.is_set() or isinstance(error, TimeoutError):
            raise TimeoutError(f"no answer within {seconds:g} seconds") from None
        raise
    finally:
        connection.close()
    if code != 200:
        raise HttpError(code, text[:500].decode(errors="replace"))
    return json.loads(text) if content.startswith("application/json") else text.decode(errors="replace")


def _exchange(connection: HTTPConnection, path: str, body: Mapping[str, Any] | None) -> tuple[int, str, bytes]:
    """(status, content type, body) of the answer."""
    if body is None:
        connection.request("GET", path)
    else:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.getheader("Content-Type", ""), response.read()


def _cut(connected: socket.socket, late: threading.Event) -> None:
    """End a connection under whoever waits for it."""
    late.set()
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def is_loopback(url: str) -> bool:
    """Whether nobody but this machine can reach the address."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
