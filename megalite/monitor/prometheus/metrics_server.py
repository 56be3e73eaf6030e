"""The HTTP server that Prometheus asks, in a process that trains: no client may take all threads and descriptors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from megalite.monitor.bounded_server import PATIENCE_S, BoundedServer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

REFUSED = b"this server answers to an address of its host, and to the host's own name\n"


class MetricsServer(BoundedServer, WSGIServer):
    """Answers with the metrics of a registry."""

    most_connections = 16
    longest_s = 30.0  # Prometheus itself gives up after 10

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        """Binds to `host`. Raises OSError where that is not possible, ImportError without prometheus_client."""
        from prometheus_client import make_wsgi_app

        self._metrics = make_wsgi_app(registry)
        super().__init__(host, port, _ScrapeHandler)
        self.set_app(self._answer)

    def server_bind(self) -> None:
        super().server_bind()
        self.setup_environ()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if self.admits_host(environ.get("HTTP_HOST", "")):
            return self._metrics(environ, start_response)
        start_response("403 Forbidden", [("Content-Type", "text/plain"), ("Content-Length", str(len(REFUSED)))])
        return [REFUSED]


class _ScrapeHandler(WSGIRequestHandler):
    timeout = PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing."""
