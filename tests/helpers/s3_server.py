"""A real S3 server (moto's, over HTTP, in a process of its own) and a gate in front of it that misbehaves when told.

The gate is an HTTP proxy. It passes requests on as they are until a `Fault` that matches one is set: then it answers
with an error, stalls, drops the connection in the middle of the body, or loses half of the body.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

ERRORS = {
    503: b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
    403: b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>",
}


@dataclass(frozen=True)
class Request:
    """As a fault judges it."""

    method: str
    path: str  # with the query
    size: int  # bytes of the body


@dataclass
class Fault:
    """What happens to the requests that `matches` chooses; `times` counts down, None = for good."""

    matches: Callable[[Request], bool]
    kind: Literal["error", "stall", "stall before body", "drop", "shorten"]
    times: int | None = None
    status: Literal[503, 403] = 503


@dataclass
class Gate:
    """The proxy's state: faults in force and the requests seen."""

    server_port: int
    faults: list[Fault] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    is_open: threading.Event = field(default_factory=threading.Event)  # ends stalls
    url: str = ""

    def fault_for(self, request: Request) -> Fault | None:
        """The first fault in force for a request, which is used up by one."""
        self.seen.append(request)
        for fault in self.faults:
            if fault.times != 0 and fault.matches(request):
                fault.times = None if fault.times is None else fault.times - 1
                return fault
        return None

    def mend(self) -> None:
        """No faults any more, and those that stall go on."""
        self.faults = []
        self.is_open.set()


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """Port of moto's server, a process that ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-c", "from moto.server import main; main()", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None and time.monotonic() < deadline, "moto's server does not start"
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def gate(server_port: int) -> Iterator[Gate]:
    """A gate before the server at `server_port`."""
    state = Gate(server_port)

    class Handler(_Handler):
        gate = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.mend()
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    gate: Gate
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and content leave together
    disable_nagle_algorithm = True

    def handle_expect_100(self) -> bool:
        return True  # the answer to it is the server's, once the body is here

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _serve(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        fault = self.gate.fault_for(Request(self.command, self.path, size))
        if fault is not None and fault.kind == "stall before body":
            self.gate.is_open.wait(60)
            self.close_connection = True
            return
        if self.headers.get("Expect"):
            self.send_response_only(100)
            self.end_headers()
            self.wfile.flush()
        body = self.rfile.read(size // 2 if fault is not None and fault.kind == "drop" else size)
        match fault.kind if fault else None:
            case "drop":
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            case "stall":
                self.gate.is_open.wait(60)
                self.close_connection = True
            case "error":
                assert fault is not None
                self._answer(fault.status, {}, ERRORS[fault.status] if self.command != "HEAD" else b"")
            case "shorten":
                del self.headers["Content-Length"]
                self._pass_on(body[: size // 2])
            case _ if len(body) == size:
                self._pass_on(body)
            case _:  # the client was killed meanwhile
                self.close_connection = True

    def _pass_on(self, body: bytes) -> None:
        server = http.client.HTTPConnection("127.0.0.1", self.gate.server_port, timeout=30)
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("expect", "connection")}
        server.request(self.command, self.path, body, headers)
        answer = server.getresponse()
        content = answer.read()
        kept = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "date", "server", "transfer-encoding")
        }
        self._answer(answer.status, kept, content)
        server.close()

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() != "content-length" or self.command == "HEAD":
                self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(content)
            self.wfile.flush()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve
