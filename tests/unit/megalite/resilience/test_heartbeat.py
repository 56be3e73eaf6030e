"""Heartbeats of strangers: whatever is in the folder, the reader goes on and believes only a rank's own line."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.resilience.heartbeat import FOLDER, LONGEST, Beat, StaleHeartbeats, read_beats, write_line

BEAT = Beat("a1b2", 1, "node7", 4321, 5, 2)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)


def line(**changed: object) -> bytes:
    return json.dumps(asdict(BEAT) | changed).encode()


@given(
    st.binary(max_size=300)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(list(asdict(BEAT))), JSON).map(lambda changed: line(**changed))
)
def test_a_line_is_a_heartbeat_or_refused(data: bytes) -> None:
    try:
        beat = Beat.parsed(data)
    except ValueError as error:
        assert str(error).isprintable()
    else:
        numbers = (beat.rank, beat.process, beat.count, beat.step)
        assert all(type(number) is int and 0 <= number < 1 << 31 for number in numbers)
        assert str(beat).isprintable()


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("beat_0001.json", line(process="x"), "its rank, process, count or step is no such number"),
        ("beat_0001.json", line(process=10**30), "its rank, process"),
        ("beat_0001.json", line(count=True), "its rank, process"),
        ("beat_0001.json", line(host="\x1b]0;pwned\x07"), "its attempt or host is no printable word"),
        ("beat_0001.json", line(surplus="\x1b[31m"), "it is no JSON object with the facts of a rank"),
        ("beat_0001.json", b"[" * 900, "it is no JSON object|Expecting value"),
        ("beat_0003.json", line(rank=2), "there is no rank 2 that writes this file"),  # whose own is another file
        ("beat_0009.json", line(rank=9), "there is no rank 9 that writes this file"),
        ("beat_0001.json", b" " * LONGEST + line(), "has more than 1,024 bytes"),
        ("beat_\x1b[1m.json", line(), "there is no rank 1 that writes this file"),
    ],
)
def test_what_no_rank_has_written_is_ignored_and_named_once(
    tmp_path: Path, name: str, data: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    write_line(tmp_path / FOLDER / "beat_0000.json", line(rank=0).decode())
    (tmp_path / FOLDER / name).write_bytes(data)
    assert list(read_beats(tmp_path, "a1b2", 4)) == [0]
    stale = StaleHeartbeats(tmp_path, "a1b2", 1e-9)
    with caplog.at_level(logging.WARNING, "megalite"):
        found = [beat.rank for _ in range(4) for beat in stale.silent(4)]
    assert set(found) <= {0}
    (told,) = caplog.messages
    assert repr(name) in told and "is no heartbeat of a rank and is ignored: " in told and told.isprintable()
    assert any(words in told for words in reason.split("|"))


@pytest.mark.parametrize("what", ["link", "pipe", "folder", "stranger"])
def test_what_is_no_file_of_ours_is_not_read(tmp_path: Path, what: str) -> None:
    path, elsewhere = tmp_path / FOLDER / "beat_0001.json", tmp_path / "elsewhere"
    path.parent.mkdir()
    elsewhere.write_bytes(line())
    if what == "link":
        path.symlink_to(elsewhere)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file to another user")
        path.write_bytes(line())
        os.chown(path, 65534, 65534)
    refused: dict[str, str] = {}
    assert read_beats(tmp_path, "a1b2", None, refused) == {} and list(refused) == [path.name]
    if what != "stranger":
        with pytest.raises(OSError, match="move it away"):
            write_line(path, "{}")
    assert elsewhere.read_bytes() == line()


def test_a_folder_that_leads_elsewhere_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody would be told otherwise that silent ranks are not found."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / FOLDER).symlink_to(tmp_path / "elsewhere")
    stale = StaleHeartbeats(tmp_path, "a1b2", 1.0)
    with caplog.at_level(logging.WARNING, "megalite"):
        assert [stale.silent(), stale.silent()] == [[], []]
    (told,) = caplog.messages
    assert told.startswith("heartbeats cannot be watched: ") and "is a symbolic link" in told
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_heartbeat_is_its_user_s_alone(tmp_path: Path) -> None:
    facts: dict[str, Any] = asdict(BEAT)
    write_line(tmp_path / FOLDER / "beat_0001.json", json.dumps(facts))
    modes = [path.stat().st_mode & 0o777 for path in (tmp_path / FOLDER, tmp_path / FOLDER / "beat_0001.json")]
    assert modes == [0o700, 0o600] and read_beats(tmp_path, "a1b2", 2) == {1: BEAT}
