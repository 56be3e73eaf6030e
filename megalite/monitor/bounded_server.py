"""The connections of our HTTP servers: their number is bounded, each has an end, and names of others are not admitted.

A page of another site, whose name may resolve to this machine (DNS rebinding), sends that name in its Host header.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from http.server import HTTPServer
from socketserver import ThreadingMixIn
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 20.0  # for a client that does not finish its request, or does not take the answer
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class BoundedServer(ThreadingMixIn, HTTPServer):
    """Answers each connection in a thread of its own, at most so many at once, and none for long."""

    daemon_threads = True
    most_connections = 64  # at once; more are closed unheard
    longest_s = 120.0  # of a connection, also where a byte comes now and then

    def __init__(self, host: str, port: int, handler: Callable[..., Any]) -> None:
        """Binds to `host`; port 0 takes a free one. Raises OSError where that is not possible."""
        self.address_family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.request_queue_size = self.most_connections
        self._host = host.lower()
        self._room = BoundedSemaphore(self.most_connections)
        self._ends: dict[Any, float] = {}  # by connection: when it has to be over, time.monotonic
        super().__init__((str(address[0]), port), handler)

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
        if name in LOOPBACK or name == self._host:
            return name != ""
        return not is_loopback(self._host) and (_is_address(name) or name in self._own_names)

    @cached_property
    def _own_names(self) -> set[str]:
        return {socket.gethostname().lower(), socket.getfqdn().lower()}

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._ends[request] = time.monotonic() + self.longest_s
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
        """Says nothing of a client that has gone away or sends nonsense: the console is the run's."""


def is_loopback(host: str) -> bool:
    """Returns whether only this machine reaches a server that listens on `host`."""
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
