"""The server of `megalite watch`: one page, and what the run has added since. Standard library alone; read only.

It answers who knows the token of the printed address, under a name that the address may have: a page of another site,
whose name may resolve to this machine, can send requests here, but has neither. No path of a request is opened.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

from launch.runtime.logs import get_logger
from megalite.monitor.bounded_server import PATIENCE_S, BoundedServer

log = get_logger(__name__)
LONGEST_QUERY = 1024
TEXT, HTML, JSON = "text/plain; charset=utf-8", "text/html; charset=utf-8", "application/json"
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}

Query = Mapping[str, str]
Answer = tuple[str, bytes, Mapping[str, str]]  # content type, body, headers of its own
Route = Callable[[Query], Answer]


class BadQuery(ValueError):
    """Raised by a route for a query that no page of ours sends; the message is one sentence."""


class RunServer(BoundedServer):
    """Serves `routes`, by their paths, to who has the token."""

    def __init__(self, host: str, port: int, routes: Mapping[str, Route]) -> None:
        """Binds to `host`; port 0 takes a free one. Raises OSError where that is not possible."""
        self.logged = ""  # the last error
        self.routes, self.token = dict(routes), secrets.token_urlsafe(24)
        super().__init__(host, port, _RequestHandler)


class _RequestHandler(BaseHTTPRequestHandler):
    """Answers one request. HTTP/1.0: a connection ends with its answer."""

    server: RunServer
    timeout = PATIENCE_S

    def version_string(self) -> str:
        """Returns the Server header, without versions."""
        return "megalite"

    def do_GET(self) -> None:
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not self.server.admits_host(hosts[0]):
            self._say(HTTPStatus.FORBIDDEN, "this server answers to the name in the address that it has printed")
            return
        try:
            url = urlsplit(self.path)
            asked = {name: values[-1] for name, values in parse_qs(url.query[:LONGEST_QUERY]).items()}
        except ValueError:
            self._say(HTTPStatus.BAD_REQUEST, "that is no address")
            return
        if not secrets.compare_digest(asked.get("token", "").encode(), self.server.token.encode()):
            self._say(HTTPStatus.FORBIDDEN, "the token of the printed address is missing, or that of an earlier start")
            return
        route = self.server.routes.get(url.path)
        if route is None:
            self._say(HTTPStatus.NOT_FOUND, "there is nothing here but the page of the run")
            return
        try:
            kind, body, headers = route(asked)
        except BadQuery as error:
            self._say(HTTPStatus.BAD_REQUEST, str(error))
        except OSError as error:
            self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"the run cannot be read: {error.strerror or error}")
        except Exception as error:  # whatever is in the run's files: the next look may find others
            sentence = f"the page cannot be made: {type(error).__name__}"
            if (logged := f"{sentence}: {error}") != self.server.logged:  # browsers ask again and again
                log.error(logged)
            self.server.logged = logged
            self._say(HTTPStatus.INTERNAL_SERVER_ERROR, sentence)
        else:
            self._send(HTTPStatus.OK, kind, body, headers)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers what is no request of ours without a word of the request in it."""
        self._say(HTTPStatus(code), HTTPStatus(code).phrase)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: addresses have the token in them."""

    def _say(self, status: HTTPStatus, sentence: str) -> None:
        self._send(status, TEXT, f"{sentence}\n".encode(), {})

    def _send(self, status: HTTPStatus, kind: str, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        length = {"Content-Type": kind, "Content-Length": str(len(body))}
        policy = {"Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'"}
        for name, value in (length | HEADERS | policy | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def json_answer(values: Any) -> Answer:
    """Returns the answer that holds `values` as JSON."""
    return JSON, json.dumps(values, default=str).encode(), {}
