"""The HTTP server that Prometheus asks. It lives in a process that trains, from which no client may take all threads
and file descriptors: connections have a limit and an end."""

from __future__ import annotations

import socket
from socketserver import TCPServer, ThreadingMixIn
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

MOST_CONNECTIONS = 16  # at once; more are closed unheard
PATIENCE_S = 20.0  # for a client that does not finish its request, or does not take the answer


class MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers with the metrics of a registry."""

    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Binds to `host`. Raises OSError where that is not possible, ImportError without prometheus_client."""
        from prometheus_client import make_wsgi_app

        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._room = BoundedSemaphore(MOST_CONNECTIONS)
        super().__init__((str(address[0]), port), _ScrapeHandler)
        self.set_app(make_wsgi_app(registry))

    def server_bind(self) -> None:
        """Binds without a look-up of the machine's name, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that has gone away or sends nonsense: the console is the run's."""


class _ScrapeHandler(WSGIRequestHandler):
    timeout = PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""
