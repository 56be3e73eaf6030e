"""Who gets an answer of the server of `megalite watch`, and what."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Thread

import pytest

from launch.inspection.watching import server as server_module
from launch.inspection.watching.server import HTML, Answer, BadQuery, RunServer
from megalite.monitor.bounded_server import is_loopback


def page(query: Mapping[str, str]) -> Answer:
    if query.get("from", "0") != "0":
        raise BadQuery("that is no place in a file")
    return HTML, b"<!doctype html>the page", {"Content-Security-Policy": "default-src 'none'"}


def broken(query: Mapping[str, str]) -> Answer:
    raise FileNotFoundError(2, "its folder is gone", "/secret/place")


def faulty(query: Mapping[str, str]) -> Answer:
    raise KeyError("/secret/place")


@contextmanager
def served(host: str = "127.0.0.1") -> Iterator[RunServer]:
    with RunServer(host, 0, {"/": page, "/broken": broken, "/faulty": faulty}) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[RunServer]:
    with served() as running:
        yield running


def ask(
    server: RunServer, path: str, host: str | None = "127.0.0.1", method: str = "GET"
) -> tuple[int, str, Mapping[str, str]]:
    """Status, body and headers; `path` is sent as it is."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    if host is not None:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def test_who_has_the_address_gets_the_page(server: RunServer) -> None:
    status, body, headers = ask(server, f"/?token={server.token}")
    assert (status, body) == (200, "<!doctype html>the page")
    assert headers["Content-Security-Policy"] == "default-src 'none'" and headers["Cache-Control"] == "no-store"
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
    assert "Python" not in headers["Server"]


@pytest.mark.parametrize("token", ["", "?token=", "?token=wrong", "?token=%C3%A9", "?Token=TOKEN", "?token=TOKENx"])
def test_nobody_else_does(server: RunServer, token: str) -> None:
    status, body, _ = ask(server, "/" + token.replace("TOKEN", server.token))
    assert status == 403 and "the page" not in body.replace("the page of", "")


@pytest.mark.parametrize(
    "host",
    [None, "", "evil.example", "127.0.0.1.evil.example", "evil.example:80", "127.0.0.1@evil.example", "[", "10.0.0.1"],
)
def test_a_foreign_name_gets_nothing_even_with_the_token(server: RunServer, host: str | None) -> None:
    """A page of evil.example, whose name then resolves to 127.0.0.1, sends its own name."""
    status, body, _ = ask(server, f"/?token={server.token}", host)
    assert status == 403 and "doctype" not in body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "localhost:8080", "127.0.0.1:1", "[::1]:5", "LOCALHOST"])
def test_a_tunnel_may_end_at_any_port(server: RunServer, host: str) -> None:
    assert ask(server, f"/?token={server.token}", host)[0] == 200


@pytest.mark.parametrize(
    "path", ["/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/metrics.jsonl", "/.", "/index.html"]
)
def test_no_path_is_opened(server: RunServer, path: str) -> None:
    assert ask(server, f"{path}?token={server.token}")[0] == 404
    assert ask(server, path)[0] == 403


def test_other_answers_say_what_is_wrong_and_no_more(server: RunServer) -> None:
    assert ask(server, f"/?token={server.token}&from=-1")[:2] == (400, "that is no place in a file\n")
    status, body, headers = ask(server, f"/broken?token={server.token}")
    assert (status, body) == (503, "the run cannot be read: its folder is gone\n") and "default-src" in str(headers)
    faulty_answer = ask(server, f"/faulty?token={server.token}")
    assert faulty_answer[:2] == (500, "the page cannot be made: KeyError\n"), "no answer looks as if nobody were there"
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(server, f"/?token={server.token}", method=method)[0] == 501
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as client:
        client.sendall(b"<script>alert(1)</script> nonsense\r\n\r\n")
        assert b"script>" not in client.recv(65536), "a browser may take it for HTML"


def test_twenty_clients_are_served_while_one_says_nothing(server: RunServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port)), ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(lambda _: ask(server, f"/?token={server.token}")[0], range(100)))
    assert answers == [200] * 100


def test_connections_have_an_end_and_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user of the host can connect: without a limit he takes all threads and file descriptors of this one."""
    monkeypatch.setattr(RunServer, "most_connections", 3)
    monkeypatch.setattr(server_module._RequestHandler, "timeout", 0.3)
    with served() as server:
        address = ("127.0.0.1", server.server_port)
        idle = [socket.create_connection(address, timeout=20) for _ in range(5)]
        assert [client.recv(1) for client in idle] == [b""] * 5, "closed at once, or after their time"
        assert ask(server, f"/?token={server.token}")[0] == 200
        for client in idle:
            client.close()


def test_a_client_that_sends_a_byte_now_and_then_is_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte begins the time of the socket anew: a few such clients would keep everybody else out."""
    monkeypatch.setattr(RunServer, "longest_s", 0.2)
    with served() as server, socket.create_connection(("127.0.0.1", server.server_port), timeout=0.05) as client:
        client.sendall(b"GET / HTTP/1.0\r\nX: ")
        for _ in range(400):  # 20 s, the patience with a silent one
            try:
                client.sendall(b"x")
                if client.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except ConnectionError:
                return
        pytest.fail("the server still listens to it")


def test_each_start_has_a_token_of_its_own() -> None:
    with served() as one, served() as other:
        assert one.token != other.token and len(one.token) >= 32
        assert ask(one, f"/?token={other.token}")[0] == 403


def test_on_another_address_names_of_others_are_refused_as_well() -> None:
    with served("0.0.0.0") as server:
        for host in ("192.168.1.7:80", "localhost", socket.gethostname()):
            assert server.admits_host(host), host
        assert not server.admits_host("evil.example")


@pytest.mark.parametrize(
    ("host", "is_local"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.1.2.3", False), ("node1", False)],
)  # fmt: skip
def test_what_counts_as_this_machine_alone(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local
