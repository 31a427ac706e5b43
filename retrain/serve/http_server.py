"""Serve an ASGI application with uvicorn in a separate thread."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
from typing import Any

from starlette.applications import Starlette
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from retrain.errors import EngineError
from retrain.serve.http_app import Access
from retrain.system.http_client import address

_REQUEST_S = 60
"""Seconds in which the headers of a connection's first or next request must arrive."""
_LEAVE_S = 5
"""Seconds in which requests in progress can be answered when the server ends."""
_MOST_CONNECTIONS = 4096
"""Largest number of concurrent connections."""


class HttpServer:
    """Listens for requests until it is closed.

    Args:
        app: application that answers requests.
        access: address and port to listen on.

    Attributes:
        url: address of the server.

    Raises:
        EngineError: the port is in use, or cannot be opened.
    """

    def __init__(self, app: Starlette, access: Access) -> None:
        family = socket.AF_INET6 if ":" in access.host else socket.AF_INET
        try:
            listening = socket.create_server((access.host, access.port), family=family, backlog=1024)
        except OSError as error:
            problem = f"port {access.port} of {access.host} cannot be opened ({error})"
            raise EngineError(f"{problem}; name another one with --port or --serve") from error
        self.url = address(access.host, listening.getsockname()[1])
        # Half of the file descriptors are left to the run.
        most = min(_MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        settings = Config(
            app,
            http=_connection(most),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level=logging.CRITICAL,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_REQUEST_S,
            timeout_graceful_shutdown=_LEAVE_S,
        )
        self._server = Server(settings)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more requests, and wait up to five seconds for those in progress."""
        self._server.should_exit = True
        self._thread.join(2 * _LEAVE_S)


class _TimedConnection(H11Protocol):
    """uvicorn's protocol with a deadline for the headers of every request."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def _expect_request(self) -> None:
        self._forget_deadline()
        # uvicorn's own timeout ends with the first byte, so a client could send one byte and hold the connection.
        self.deadline = self.loop.call_later(_REQUEST_S, self._close_if_idle, self.cycle)

    def _forget_deadline(self) -> None:
        if self.deadline is not None:  # it would keep the last request in memory
            self.deadline.cancel()

    def _close_if_idle(self, last: Any) -> None:
        if self.cycle is last and (last is None or last.response_complete):
            self.transport.close()


def _connection(most: int) -> type[H11Protocol]:
    """Return uvicorn's protocol with deadlines, and a limit on the number of connections."""

    class LimitedConnection(_TimedConnection):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                transport.close()

    return LimitedConnection
