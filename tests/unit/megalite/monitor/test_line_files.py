"""Files of one object per line: long ones, torn ones, and storage that refuses to take a line."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest

from launch.supervision.run_progress import RunProgress
from megalite.monitor import line_files
from megalite.monitor.events import EVENTS, EventLog, read_events
from megalite.monitor.goodput import Goodput
from megalite.monitor.line_files import LineFile, stream_lines
from megalite.monitor.prometheus.totals import COUNTED_UP_TO, SHOWN, RunTotals, keep_shown
from megalite.monitor.sinks.jsonl import METRICS, JsonLinesSink, stream_records


def line(step: int, padding: int = 0) -> str:
    return json.dumps({"step": step, "loss": 1.0 / step, "padding": "x" * padding}) + "\n"


def lines_of(path: Path) -> list[int]:
    return [json.loads(one)["step"] for one in path.read_text().splitlines()]


@pytest.mark.parametrize("padding", [0, 900, 300_000])
@pytest.mark.parametrize("kept", [0, 1, 17, 40, 99])
def test_only_the_lines_of_later_steps_are_cut(tmp_path: Path, padding: int, kept: int) -> None:
    """The largest lines are longer than what is looked at backwards at once; and the last one is torn."""
    path, steps = tmp_path / METRICS, 20 if padding > 1000 else 40
    path.write_text("".join(line(step, padding) for step in range(1, steps + 1)) + '{"step": 17, "lo')
    LineFile(path).cut_after(kept)
    assert lines_of(path) == list(range(1, min(kept, steps) + 1))
    LineFile(path).append(line(100))
    assert [one["step"] for one in stream_lines(path, after_step=kept)] == [100]


def test_a_whole_line_without_its_end_is_kept_and_garbage_before_it_is_passed_over(tmp_path: Path) -> None:
    """A power cut leaves zeros on some file systems, and a kill a line without its newline."""
    path = tmp_path / METRICS
    path.write_bytes(line(1).encode() + b"\0" * 700 + b"\n" + b"[3]\n" + line(2).encode() + line(3).encode()[:-1])
    sink = JsonLinesSink(path, 3)
    sink.on_step({"step": 4})
    assert [record["step"] for record in list(stream_records(path))] == [1, 2, 3, 4]


@contextmanager
def bytes_read() -> Iterator[list[int]]:
    """What this process reads from files meanwhile, by the kernel's own count."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    found, before = [0], count()
    yield found
    found[0] = count() - before


def test_what_a_start_a_rollback_and_a_supervisor_read_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """64 GB of a run's records, of which only the last exist; reading them all at each start took minutes."""
    metrics, log = tmp_path / METRICS, EventLog(tmp_path / EVENTS)
    with metrics.open("wb") as file:
        file.truncate(1 << 36)
        file.seek(1 << 36)
        for step in range(1_000_000, 1_000_200):
            record = {"step": step, "time": 1.7e9 + step, "session_s": float(step), "step_time_s": 1.0}
            file.write(b"\n" + json.dumps(record).encode())
    log.write("started", step=0, before_s=1.0)
    taken = {("taken",): 1_000_150.0, ("skipped",): 0.0}
    counted = {("step",): 1_000_150.0, ("time",): 4e9}
    keep_shown(tmp_path / SHOWN, {"megalite_steps_total": taken, COUNTED_UP_TO: counted})
    log.write("saved", step=1_000_150, account={"productive": 999_000.0, "startup": 9.0})
    with bytes_read() as read:
        totals = RunTotals.of_run(tmp_path, 1_000_180, 1, 1).values()
        goodput, sink = Goodput(tmp_path, 1_000_180, log.write), JsonLinesSink(metrics, 1_000_180)
        again = {"step": 1_000_160, "time": 1.8e9, "step_time_s": 1.0}  # a rollback
        sink.on_step(again | goodput.measure(again))
        folder = RunProgress.read(tmp_path)
    assert folder is not None and folder.step == 1_000_160
    assert goodput.seconds()["productive"] == 999_000 + 10
    assert goodput.lost_steps + goodput.summary()["lost_steps"] == 2 * 19 + 21
    assert totals["megalite_steps_total"]["taken",] == 1_000_199
    assert read[0] < 8 << 20
    assert next(stream_lines(metrics, after_step=1_000_159))["step"] == 1_000_160


def test_lines_that_storage_refuses_wait(tmp_path: Path) -> None:
    """They were dropped for good, and nothing in the file said so. Here the disk takes a part of a line, then none."""
    log = EventLog(tmp_path / EVENTS)
    sink = JsonLinesSink(tmp_path / METRICS, 0)
    sink.on_step({"step": 1})
    room = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, room[1]))
        for step in (2, 3, 4, 3):  # with a rollback
            with pytest.raises(OSError):
                sink.on_step({"step": step})
        with pytest.raises(OSError):
            log.write("saved", reason="long enough to be cut")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, room)
    assert (tmp_path / METRICS).read_text() == '{"step":1}\n'
    sink.sync()
    assert (tmp_path / METRICS).read_text() == '{"step":1}\n{"step":2}\n{"step":3}\n'
    log.sync()
    assert [event["event"] for event in read_events(tmp_path / EVENTS)] == ["saved"]


def test_what_waits_is_bounded_and_what_is_lost_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_files, "MOST_WAITING_BYTES", sum(len(line(step)) for step in (5, 6, 7)))
    opened, path = line_files.open_to_write, tmp_path / METRICS
    file = LineFile(path)

    def refuse(*_: object, **__: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(line_files, "open_to_write", refuse)
    for step in range(1, 8):
        with suppress(OSError):
            file.append(line(step))
    with pytest.raises(OSError, match="the lines of steps 1 to 7 could not be written"):
        file.close()
    monkeypatch.setattr(line_files, "open_to_write", opened)
    file.close()
    said, *kept = list(stream_lines(path))
    assert said["lost"] == "the lines of steps 1 to 4" and [one["step"] for one in kept] == [5, 6, 7]
    assert [record["step"] for record in list(stream_records(path))] == [5, 6, 7]


def test_a_synced_file_is_on_disk_with_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose folder was not synced is not there after a power cut."""
    synced = []

    def note(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))

    monkeypatch.setattr(os, "fdatasync", note)
    monkeypatch.setattr(os, "fsync", note)
    sink = JsonLinesSink(tmp_path / METRICS, 0)
    sink.on_step({"step": 1})
    assert synced == []  # not in a step's way
    sink.sync()
    assert synced == [str(tmp_path / METRICS), str(tmp_path)]
    (tmp_path / METRICS).unlink()  # that it is still open must not hide
    sink.on_step({"step": 2})
    assert (tmp_path / METRICS).read_text() == '{"step":2}\n'


def test_a_kill_loses_no_acknowledged_line_and_leaves_none_twice(tmp_path: Path) -> None:
    """Thirty writers are killed at random moments, also inside a line and inside the cut by which a resume begins.

    A reader sees all that was acknowledged, and at most the one thing more that the writer was at.
    """
    chance, path, found = random.Random(29), tmp_path / "metrics.jsonl", list[dict[str, Any]]()
    for attempt in range(30):
        kept = max(0, len(found) - chance.randrange(4)) if len(found) < 60 else 5
        texts = ["x" * chance.choice((9, 99, 300_000)) for _ in range(40)]
        lines = [{"step": kept + n, "attempt": attempt, "text": text} for n, text in enumerate(texts, start=1)]
        states = [found, *(found[:kept] + lines[:n] for n in range(len(lines) + 1))]
        reading, writing = os.pipe()
        if (writer := os.fork()) == 0:
            _write_lines(path, kept, lines, writing)
        os.close(writing)
        with os.fdopen(reading, "rb") as acknowledged:
            done = len(acknowledged.read(chance.randrange(9)))
            time.sleep(chance.random() / 500)
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
            done += len(acknowledged.read())
        found = list(stream_lines(path))
        steps = [(one["attempt"], one["step"]) for one in found]
        assert found in states[done : done + 2], f"attempt {attempt}, {done} acknowledged: {steps}"
    assert found[-1]["step"] == len(found)


def _write_lines(path: Path, kept: int, lines: list[dict[str, Any]], acknowledge: int) -> NoReturn:
    """Writes as a run does that goes on behind a step, with a byte for the cut and for each line once it is written."""
    with suppress(BaseException):
        file = LineFile(path)
        file.cut_after(kept)
        os.write(acknowledge, b".")
        for line in lines:
            file.append(json.dumps(line) + "\n")
            os.write(acknowledge, b".")
    os._exit(0)
