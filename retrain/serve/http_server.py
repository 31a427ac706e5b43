"""An ASGI application behind uvicorn in a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import threading
from typing import Any

from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from retrain.errors import EngineError
from retrain.serve.http_app import Access, HttpApp
from retrain.system.http_client import address

_REQUEST_S = 60
"""Time for the header of the first or next request of a connection."""
_LEAVE_S = 5
"""Time for answers under way when the server ends."""
_MOST_CONNECTIONS = 4096


class HttpServer:
    """Listens for requests until it is closed.

    Args:
        access: where it listens.
    Attributes:
        url: its address.
    Raises:
        EngineError: the port cannot be had.
    """

    def __init__(self, app: HttpApp, access: Access) -> None:
        family = socket.AF_INET6 if ":" in access.host else socket.AF_INET
        try:
            listening = socket.create_server((access.host, access.port), family=family, backlog=1024)
        except OSError as error:
            problem = f"port {access.port} of {access.host} cannot be had ({error})"
            raise EngineError(f"{problem}; name another one with --port or --serve") from error
        self.url = address(access.host, listening.getsockname()[1])
        # The run needs files, too.
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
        """Take no more requests; those that are answered within five seconds still are."""
        self._server.should_exit = True
        self._thread.join(2 * _LEAVE_S)


def _connection(most: int) -> type[H11Protocol]:
    """Return uvicorn's protocol for at most so many connections, each with a deadline for every request's header."""

    class Connection(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._expect_request()
            if len(self.connections) > most:
                transport.close()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect_request()

        def _expect_request(self) -> None:
            # uvicorn's own deadline ends with the first byte, which may be the last for long.
            self.loop.call_later(_REQUEST_S, self._end_unless_asked, self.cycle)

        def _end_unless_asked(self, last: Any) -> None:
            if self.cycle is last and (last is None or last.response_complete):
                self.transport.close()

    return Connection
