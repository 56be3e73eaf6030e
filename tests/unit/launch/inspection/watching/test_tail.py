"""Reading on in a file that grows: every line once, and from the start where the file is another one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.inspection.watching import tail
from launch.inspection.watching.tail import Added, Cursor
from megalite.checkpoint.durable_files import write_durably
from megalite.checkpoint.safe_files import UnsafeFile


def test_each_line_comes_once_and_half_a_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert Added.read(path, Cursor()) == Added([], Cursor(), is_anew=False), "a run that has not begun has no lines"
    path.write_text('{"step": 1}\n{"step": ')
    first = Added.read(path, Cursor())
    assert first.lines == ['{"step": 1}'] and not first.is_anew
    assert Added.read(path, first.next) == Added([], first.next, is_anew=False)
    with path.open("a") as file:
        file.write('2}\n{"step": 3}\n')
    second = Added.read(path, Cursor.parse(str(first.next)))
    assert second.lines == ['{"step": 2}', '{"step": 3}'] and not second.is_anew


@pytest.mark.parametrize("grows_again", [False, True], ids=["shorter", "longer than before"])
def test_a_rollback_begins_anew(tmp_path: Path, grows_again: bool) -> None:
    """The second kind is longer than what was read when one looks again: its size alone does not tell."""
    path = tmp_path / "metrics.jsonl"
    lines = [f'{{"step": {step}, "time": {1e9 + step}}}\n' for step in range(1, 9)]
    path.write_text("".join(lines))
    read = Added.read(path, Cursor())
    again = [line.replace('"time": 1', '"time": 2') for line in lines[4:]] * (2 if grows_again else 0)
    write_durably(path, "".join([*lines[:4], *again]).encode())
    added = Added.read(path, read.next)
    assert added.is_anew and added.lines == [line.strip() for line in [*lines[:4], *again]]
    assert Added.read(path, added.next).lines == []


def test_a_file_that_is_gone_is_empty_and_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    read = Added.read(path, Cursor())
    path.unlink()
    assert Added.read(path, read.next) == Added([], Cursor(), is_anew=True)


@pytest.mark.parametrize("text", ["-1", "1", "01-0123456789abcdef", "1e3", "1-xyz", "0x10", "", " 0", "9" * 400])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no place in a file"):
        Cursor.parse(text)


def test_it_is_neither_led_away_nor_made_to_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/etc/passwd")
    for name in ("pipe", "link"):
        with pytest.raises(UnsafeFile):
            Added.read(tmp_path / name, Cursor())


def test_a_line_that_no_run_writes_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that, a file without line ends would be read from the same place for ever."""
    monkeypatch.setattr(tail, "LONGEST_LINE_BYTES", 1000)
    monkeypatch.setattr(tail, "MOST_BYTES", 1000)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * 3500 + b'\n{"step": 1}\n')
    found, cursor = [], Cursor()
    for _ in range(6):
        added = Added.read(path, cursor)
        found, cursor = found + added.lines, added.next
    assert found[-1] == '{"step": 1}' and cursor.offset == path.stat().st_size


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunks=st.lists(st.binary(max_size=200).map(lambda data: data.replace(b"\r", b"")), max_size=12),
    most=st.integers(80, 400),
)
def test_however_a_file_grows_all_its_lines_are_read_once(tmp_path: Path, chunks: list[bytes], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tail, "MOST_BYTES", 1000 + most)
        path = tmp_path / "file"
        path.write_bytes(b"")
        found, cursor = [], Cursor()
        for chunk in [*chunks, b"\n"]:
            with path.open("ab") as file:
                file.write(chunk)
            added = Added.read(path, cursor)
            assert not added.is_anew
            found, cursor = found + added.lines, added.next
        while (added := Added.read(path, cursor)).has_more:
            found, cursor = found + added.lines, added.next
        found += added.lines
    whole = (b"".join(chunks) + b"\n").split(b"\n")
    assert found == [line.decode("utf-8", "replace") for line in whole if line]
