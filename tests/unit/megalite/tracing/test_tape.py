"""The tape of a step, on the host's clock and on a device's, whose events are played by a made class."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.parallel.mesh import Mesh
from megalite.tracing import tape as tape_module
from megalite.tracing.activity import Activity, Operation, Phase
from megalite.tracing.tape import DeviceClock, Tape


def test_a_tape_ends_with_the_record_that_begins_the_next_one() -> None:
    activity = Activity(Mesh(), 0)
    activity.tape = Tape()
    activity.begin_phase(Phase.DATA, 1)
    activity.record_op(Operation.FORWARD, 1)
    began = activity.tape.mark()
    activity.tape.add_collective(began, "tensor", "all_reduce", 48)
    activity.begin_phase(Phase.LOGGING)
    first = activity.tape.take()
    assert [entry[4] for entry in first.entries] == [Operation.BEGIN, Operation.FORWARD, Operation.BEGIN]
    assert not first.is_cut and first.collectives[0][2:] == ("tensor", "all_reduce", 48, False)
    assert 0 <= first.collectives[0].seconds < 1
    activity.record_op(Operation.MEET)
    second = activity.tape.take()
    assert [entry[3:5] for entry in second.entries] == [
        (Phase.LOGGING, Operation.BEGIN),
        (Phase.LOGGING, Operation.MEET),
    ]
    assert second.entries[0][0] == first.entries[-1][0], "no moment between two steps is lost"
    assert not second.collectives


def test_a_million_records_take_no_more_memory_and_the_step_still_ends_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tape_module, "LONGEST_TAPE", 100)
    tape = Tape()
    for number in range(1_000):
        tape.add((float(number), number))
        tape.add_collective(tape.mark(), "data", "send", 1)
    recorded = tape.take()
    assert recorded.is_cut and len(recorded.entries) == 100 and len(recorded.collectives) == 100
    assert recorded.entries[-1][0] == 999.0
    tape.add((1000.0, 0))
    assert not tape.take().is_cut


class _Device:
    """A device whose clock, that of the host too, is set by hand."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_ms, self.made = 0.0, 0
        self.stream = "the step's"
        self.behind: dict[str, int] = {}  # how often events of a stream are still asked for in vain; -1: always
        patch.setattr(tape_module, "monotonic", lambda: 1000.0 + self.now_ms / 1000)

    def event(self) -> _Event:
        self.made += 1
        return _Event(self)


class _Event:
    def __init__(self, device: _Device) -> None:
        self._device, self._at_ms, self._stream = device, -1.0, ""

    def record(self) -> None:
        self._at_ms, self._stream = self._device.now_ms, self._device.stream

    def query(self) -> bool:
        left = self._device.behind.get(self._stream, 0)
        if left:
            self._device.behind[self._stream] = left - 1
            self._device.now_ms += 0.01
        return not left

    def elapsed_time(self, end_event: Any) -> float:
        assert not self._device.behind.get(end_event._stream), "CUDA raises an error for an event that is to come"
        return float(end_event._at_ms - self._at_ms)


def _recorded_step(device: _Device) -> Tape:
    activity = Activity(Mesh(), 0)
    activity.tape = Tape(DeviceClock(device.event))
    activity.record_op(Operation.FORWARD)
    device.now_ms += 5.0
    began = activity.tape.mark()
    device.stream = "another"
    device.now_ms += 2.0
    activity.tape.add_collective(began, "tensor", "all_gather", 3)
    device.stream = "the step's"
    activity.record_op(Operation.FINISH)
    return activity.tape


def test_times_of_a_device_are_those_of_its_events_and_events_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    device = _Device(monkeypatch)
    tape = Tape(DeviceClock(device.event))
    activity = Activity(Mesh(), 0)
    activity.tape = tape
    made, ended = [], 0.0
    for number in range(3):
        for milliseconds, operation in ((5.0, Operation.FORWARD), (30.0, Operation.BACKWARD)):
            activity.record_op(operation)
            device.now_ms += milliseconds
        began = tape.mark()
        device.now_ms += 7.0
        tape.add_collective(began, "tensor", "all_gather", 3)
        activity.record_op(Operation.FINISH)
        entries, collectives, _ = tape.take()
        times = [entry[0] for entry in entries[-3:]]
        assert times[1] - times[0] == pytest.approx(0.005) and times[2] - times[1] == pytest.approx(0.037)
        assert collectives[0].began - times[1] == pytest.approx(0.030)
        assert collectives[0].seconds == pytest.approx(0.007)
        assert not number or entries[0][0] == ended, "no moment between two steps is lost"
        made.append(device.made)
        ended = entries[-1][0]
    assert made[1] == made[2] <= 8, "a pool"


def test_an_event_that_is_seen_a_little_late_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one is recorded just before the tape is taken, and a device that is idle has it some microseconds later:
    asked only once, almost every step would fall back on the host's times."""
    device = _Device(monkeypatch)
    tape = _recorded_step(device)
    device.behind = {"the step's": 3}
    entries, collectives, _ = tape.take()
    assert entries[-1][0] - entries[0][0] == pytest.approx(0.007) and len(collectives) == 1


@pytest.mark.parametrize("stream", ["the step's", "another"])
def test_a_device_that_has_not_come_so_far_leaves_the_times_of_the_host(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only a stream beside the step's is behind."""
    device = _Device(monkeypatch)
    tape = _recorded_step(device)
    device.behind = {stream: -1}
    before = device.now_ms
    entries, collectives, _ = tape.take()
    assert [entry[4] for entry in entries] == [Operation.FORWARD, Operation.FINISH] and not collectives
    assert device.now_ms - before < 100, "it is not waited for"
    device.behind = {}
    tape.add((2000.0, "next"))
    assert [entry[1] for entry in tape.take().entries][-1] == "next", "the next step has a tape again"


def test_a_million_collectives_take_no_more_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape_module, "LONGEST_TAPE", 100)
    device = _Device(monkeypatch)
    tape = Tape(DeviceClock(device.event))
    for number in range(1_000):
        tape.add((float(number), number))
        tape.add_collective(tape.mark(), "data", "send", 1)
    assert device.made == 1 + 100 + 2 * 100
    assert tape.take().is_cut


def test_a_window_is_taken_while_the_next_step_is_on_the_tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where results are read a step late: each window has its own records, no moment is lost, and events are used
    again although the device is never idle."""
    device, made = _Device(monkeypatch), []
    tape = Tape(DeviceClock(device.event))
    ended = 0.0
    for number in range(6):
        tape.add((1000.0 + device.now_ms / 1000, f"begin {number}"))
        device.now_ms += 5.0
        tape.add_collective(tape.mark(), "tensor", f"of {number}", 3)
        tape.add((1000.0 + device.now_ms / 1000, f"end {number}"))
        if number:
            entries, collectives, _ = tape.take()
            assert [entry[1] for entry in entries[-2:]] == [f"begin {number - 1}", f"end {number - 1}"]
            assert [one.operation for one in collectives] == [f"of {number - 1}"]
            assert entries[-1][0] - entries[-2][0] == pytest.approx(0.005)
            assert number == 1 or entries[0][0] == ended, "no moment between two steps is lost"
            ended = entries[-1][0]
            made.append(device.made)
        tape.cut()
    assert made[2] == made[-1], "a pool"
    entries, _, _ = tape.take()
    assert entries[-1][1] == "end 5" and entries[0][0] == ended
    device.now_ms += 3.0
    tape.add((1000.0 + device.now_ms / 1000, "later"))
    assert tape.take().entries[-1][0] == pytest.approx(1000.0 + device.now_ms / 1000), "the clock has not gone astray"


def test_a_device_whose_clock_goes_wrong_is_put_right_by_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """No window ends before its last record was made, nor after it was read."""
    device = _Device(monkeypatch)
    monkeypatch.setattr(_Event, "elapsed_time", lambda self, end: 0.5 * (end._at_ms - self._at_ms))
    tape = Tape(DeviceClock(device.event))
    for number in range(50):
        tape.add((1000.0 + device.now_ms / 1000, number))
        if number > 1:
            tape.take()
        tape.cut()
        device.now_ms += 10.0
    ended = tape.take().entries[-1][0]
    assert 1000.0 + device.now_ms / 1000 - ended < 0.03, "the error of 50 windows has not added up"
