"""The server of `megalite watch`: one page, and what the run has added since. Standard library alone; read only.

It answers who knows the token of the printed address, under a name that the address may have: a page of another site,
whose name may resolve to this machine, can send requests here, but has neither. No path of a request is opened.
"""

from __future__ import annotations

import ipaddress
import json
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qs, urlsplit

MOST_CONNECTIONS = 64  # at once; more are closed unheard
PATIENCE_S = 20.0  # for a client that does not finish its request, or does not take the answer
LONGEST_S = 120.0  # of a connection, also where a byte comes now and then
LONGEST_QUERY = 1024
LOOPBACK = ("127.0.0.1", "localhost", "::1")
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


class RunServer(ThreadingHTTPServer):
    """Serves `routes`, by their paths, to who has the token."""

    daemon_threads = True
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, host: str, port: int, routes: Mapping[str, Route]) -> None:
        """Binds to `host`; port 0 takes a free one. Raises OSError where that is not possible."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.routes, self.token = dict(routes), secrets.token_urlsafe(24)
        self._is_local, self._names = is_loopback(host), {host.lower(), *_own_names(host)}
        self._room = BoundedSemaphore(MOST_CONNECTIONS)
        self._ends: dict[Any, float] = {}  # by connection: when it has to be over, time.monotonic
        super().__init__((host, port), _RequestHandler)

    def server_bind(self) -> None:
        """Binds without a look-up of the machine's name, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def admits_host(self, header: str) -> bool:
        """Returns whether a Host header is a name of this server: on loopback one of loopback, elsewhere also any
        address, since what an attacker can let resolve to this machine is a name."""
        try:
            name = (urlsplit(f"//{header}").hostname or "").lower()
        except ValueError:
            return False
        return name in LOOPBACK or name in self._names or (not self._is_local and _is_address(name))

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._ends[request] = time.monotonic() + LONGEST_S
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._ends.pop(request, None)
            self._room.release()

    def service_actions(self) -> None:
        """Ends connections that last too long; is called between two connections, and when none comes."""
        now = time.monotonic()
        for request in [request for request, end_s in list(self._ends.items()) if end_s < now]:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing of a client that has gone away or sends nonsense."""


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


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a server that listens on `host`."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _own_names(host: str) -> set[str]:
    """Returns the names of this machine, where a server listens on an interface that others reach."""
    return set() if is_loopback(host) else {socket.gethostname().lower(), socket.getfqdn().lower()}
