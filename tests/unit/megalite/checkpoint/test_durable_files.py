"""Files that are replaced in one step, by whoever and however many at a time."""

from __future__ import annotations

import errno
import fcntl
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest

from megalite.checkpoint import durable_files as files
from megalite.checkpoint.durable_files import write_durably


def test_what_a_killed_writer_left_is_taken_again(tmp_path: Path) -> None:
    (tmp_path / ".latest.tmp").write_bytes(b"half of something longer")
    write_durably(tmp_path / "latest", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("latest", b"new")]


def test_a_write_that_fails_leaves_nothing_and_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"old")
    monkeypatch.setattr(files, "sync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError, match="No space") as caught:
        write_durably(tmp_path / "x", b"new")
    assert caught.value.filename == str(tmp_path / "x")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"old")]


def test_a_second_writer_does_not_touch_the_file_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first has written and not yet renamed."""
    path, real = tmp_path / "x", files.sync

    def another_writes(synced: Path) -> None:
        monkeypatch.setattr(files, "sync", real)
        write_durably(path, b"second, and much longer")
        assert path.read_bytes() == b"second, and much longer" and synced.read_bytes() == b"first"

    monkeypatch.setattr(files, "sync", another_writes)
    write_durably(path, b"first")
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]


def test_a_file_that_has_just_been_renamed_is_not_written_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has opened the temporary file, and locks it only after it has become the file itself."""
    path, real = tmp_path / "x", fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", real)
        (tmp_path / ".x.tmp").write_bytes(b"first")
        (tmp_path / ".x.tmp").rename(path)
        (tmp_path / ".x.tmp").write_bytes(b"of a third")
        real(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    kept = tmp_path / "kept"
    monkeypatch.setattr(files, "sync", lambda _: None if kept.exists() else kept.hardlink_to(path))
    write_durably(path, b"second")
    assert kept.read_bytes() == b"first" and path.read_bytes() == b"second"


def test_many_writers_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    problems: list[Exception] = []

    def write(text: bytes) -> None:
        try:
            for _ in range(20):
                write_durably(path, text)
                assert path.read_bytes() in contents
        except (OSError, AssertionError) as problem:
            problems.append(problem)

    contents = [bytes([65 + number]) * (1000 * number + 1) for number in range(4)]
    threads = [threading.Thread(target=write, args=(text,)) for text in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems and list(tmp_path.iterdir()) == [path]
