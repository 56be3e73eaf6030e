"""What events.jsonl keeps of a run that is killed in the middle of a line."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megalite.monitor.events import EventLog, read_events


def test_events_are_lines_with_a_time_and_can_be_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert read_events(path) == []
    before = time.time()
    log = EventLog(path)
    log.write("started", step=0)
    (event,) = read_events(path)  # nothing waits in a buffer that a kill would empty
    assert before <= event.pop("time") <= time.time()
    assert event == {"event": "started", "step": 0}
    log.write("saved", folder=tmp_path)
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["started", "saved"]


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_half_a_line_is_passed_over_and_the_next_session_starts_a_new_one(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.write("started")
    log.write("saved", step=10)
    path.write_bytes(path.read_bytes()[:-cut])
    complete = cut == 1  # only the end of the line is missing
    assert [event["event"] for event in read_events(path)] == ["started", "saved"][: 1 + complete]
    EventLog(path).write("started", step=3)
    assert [event["event"] for event in read_events(path)] == ["started", "saved", "started"][:: 1 if complete else 2]


def test_lines_that_are_not_events_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'\x00\x00\xff\n[1]\n{"event": 3}\n\n{"event": "ended", "time": 1.0}\n')
    assert read_events(path) == [{"event": "ended", "time": 1.0}]
