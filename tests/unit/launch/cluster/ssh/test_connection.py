"""A connection to a host that prints whatever it likes: its answers are found, and nothing else is taken for one."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from resource import RUSAGE_SELF, getrusage

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.cluster.ssh.connection import LINE_BYTES, HostConnection, HostError, Refused, answer_in, short_lines

# an ssh that prints something, and then runs the remote command here
SSH = """#!/bin/bash
while [[ $1 == -* ]]; do shift; done
shift
{first}
eval "$*"
"""
WORD = "0123456789abcdef"
Connect = Callable[[str], HostConnection]


@pytest.fixture
def connect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Connects to a host that does something at login."""

    def make(first: str) -> HostConnection:
        (tmp_path / "ssh").write_text(SSH.format(first=first))
        (tmp_path / "ssh").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        return HostConnection("node1")

    return make


@pytest.mark.parametrize(
    "first",
    [
        "echo 'megalite 5'; echo 'megalite {}'; echo 'megalite {\"id\": 0}'",
        'python3 -c \'print("megalite " + "[" * 100_000)\'',
        "echo -n 'Last login: today '",
        "head -c 5000000 /dev/zero; echo",
        "head -c 3000000 /dev/urandom",
    ],
    ids=["like an answer", "nested", "no end of line", "5 MB without an end", "random"],
)
def test_messages_at_login_are_no_answers(connect: Connect, first: str) -> None:
    began = time.monotonic()
    connection = connect(first)
    try:
        assert connection.is_open and connection.ask("clock")["time"] > 0
        with pytest.raises(Refused, match=r"^host node1 cannot do what it was asked \(no such thing\): KeyError: "):
            connection.ask("no such thing")
        assert time.monotonic() - began < 10
    finally:
        connection.close()


def test_a_host_that_never_ends_its_line_is_given_up_and_takes_no_memory(connect: Connect) -> None:
    began, before_kb = time.monotonic(), getrusage(RUSAGE_SELF).ru_maxrss
    with pytest.raises(HostError, match=r"host node1 (has not answered for|cannot be reached)"):
        connect("exec timeout 2 head -c 3000000000 /dev/zero")
    assert time.monotonic() - began < 30 and getrusage(RUSAGE_SELF).ru_maxrss - before_kb < 100_000


def test_what_ssh_says_on_its_way_out_has_an_end(connect: Connect) -> None:
    """Its messages go into a file of ours, which a host could fill our disk with."""
    with pytest.raises(HostError, match=r"host node1 cannot be reached \(.{1,300}\): try") as caught:
        connect("sleep 0.5; exec timeout 20 yes 'no luck' >&2")  # ssh itself is limited as soon as it has started
    assert "no luck" in str(caught.value) and len(str(caught.value)) < 1000


@given(st.binary(max_size=200), st.binary(max_size=200), st.booleans())
def test_a_line_is_an_answer_or_nothing(before: bytes, after: bytes, has_word: bool) -> None:
    answer = answer_in(before + WORD.encode() * has_word + after, WORD)
    assert answer is None or (type(answer["id"]) is int and ({"reply", "error"} & answer.keys()))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["id", "reply", "error", "x"]), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_only_a_numbered_reply_or_error_is_an_answer(value: object) -> None:
    answer = answer_in(f"motd {WORD} {json.dumps(value)}\n".encode(), WORD)
    is_answer = (
        isinstance(value, dict)
        and type(value.get("id")) is int
        and value["id"] >= 0
        and (isinstance(value["error"], str) if "error" in value else isinstance(value.get("reply"), dict))
    )
    assert answer == (value if is_answer else None)


def test_lines_that_are_too_long_are_passed_over() -> None:
    long = b"x" * (3 * LINE_BYTES)
    stream = io.BytesIO(b"a\n" + long + b"\n" + b"b\n" + long + b"c\n" + b"d\n" + b"half")
    assert list(short_lines(stream)) == [b"a\n", b"b\n", b"d\n"]
    assert answer_in(WORD.encode() + b"[" * 100_000, WORD) is None
