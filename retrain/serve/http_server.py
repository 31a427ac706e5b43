"""Serve an ASGI application with uvicorn in a separate thread."""

from __future__ import annotations

import logging
import resource
import socket
import threading

from starlette.applications import Starlette
from uvicorn import Config, Server

from retrain.errors import EngineError
from retrain.serve.http_app import Access
from retrain.system.http_client import address

_IDLE_S = 60
"""Seconds without a request after which a connection is closed."""
_LEAVE_S = 5
"""Seconds in which requests in progress can be answered when the server ends."""
_MOST_CONNECTIONS = 4096
"""Number of concurrent connections from which requests are answered with status 503."""


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
            # uvicorn would take httptools and uvloop where they happen to be installed, and behave differently there.
            http="h11",
            limit_concurrency=most,
            ws="none",
            lifespan="off",
            loop="asyncio",
            # The screen belongs to the run; uvicorn's lines would break its display.
            log_config=None,
            log_level=logging.CRITICAL,
            # Without a proxy in front, X-Forwarded-For is what a client claims.
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_LEAVE_S,
        )
        self._server = Server(settings)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more requests, and wait up to five seconds for those in progress."""
        self._server.should_exit = True
        # Requests get `_LEAVE_S`, and closing sockets takes a moment more.
        self._thread.join(2 * _LEAVE_S)
