"""Where the wall time of a run went, over crashes and resumes; the clock may say what it likes."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.monitor import events as events_module
from megalite.monitor import goodput as goodput_module
from megalite.monitor.events import EVENTS, EventLog, read_events
from megalite.monitor.goodput import CATEGORIES, Goodput, format_steps_without_record, shares_of
from megalite.monitor.sinks.jsonl import METRICS, JsonLinesSink


class World:
    """A run folder, and clocks that only the test moves."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.now, self.wall_offset, self.process_began = folder, 0.0, 1.7e9, 0.0
        clock = SimpleNamespace(time=lambda: self.now + self.wall_offset, monotonic=lambda: self.now)
        monkeypatch.setattr(goodput_module, "time", clock)
        monkeypatch.setattr(events_module, "time", clock)
        monkeypatch.setattr(goodput_module, "process_age_s", lambda: self.now - self.process_began)

    def start(self, step: int, startup_s: float = 0.0, saved_at: float = 0.0) -> tuple[Goodput, JsonLinesSink]:
        """A new process: `startup_s` pass before its Goodput is made."""
        self.process_began = self.now
        self.now += startup_s
        goodput = Goodput(self.folder, step, EventLog(self.folder / EVENTS).write, saved_at, layout="dp=2")
        return goodput, JsonLinesSink(self.folder / METRICS, step)

    def do(self, session: tuple[Goodput, JsonLinesSink], first: int, last: int, **parts: Any) -> float:
        """Steps `first` to `last` of a second each; the goodput after them."""
        share = 0.0
        for step in range(first, last + 1):
            self.now += 1
            record = {"step": step, "time": self.now + self.wall_offset, "step_time_s": 1.0, "skipped": False} | parts
            self.now += sum(value for name, value in parts.items() if name.endswith("_s"))
            record |= session[0].measure(record)
            share = shares_of(session[0].seconds())["productive"]
            assert record["goodput"] == round(share, 4)
            session[1].on_step(record)
        return share


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def seconds_of(goodput: Goodput) -> dict[str, float]:
    return {name: round(value, 6) for name, value in goodput.seconds().items() if value > 1e-6}


def test_crashes_and_resumes_are_accounted_to_the_second(world: World) -> None:
    session = world.start(0, startup_s=10)
    world.now += 5
    assert seconds_of(session[0]) == {"startup": 15}
    assert world.do(session, 1, 20) == pytest.approx(20 / 35)
    assert session[0].sentence() == "goodput 57.1% of 35 s in 1 session: steps that count 57.1%, startup 42.9%"
    world.now += 3  # dies in its 21st step, which nobody knows of
    world.now += 30
    session = world.start(15, startup_s=8)
    kept = {"productive": 15, "lost": 5, "startup": 23, "down": 33}
    assert seconds_of(session[0]) == kept
    world.do(session, 16, 18, save_blocked_s=0.5, evaluation_s=2.0, self_check_s=0.25)
    world.do(session, 19, 20, skipped=True)
    kept |= {"productive": 18, "saves": 1.5, "evaluation": 6, "checks": 0.75, "skipped": 2}
    assert seconds_of(session[0]) == kept
    world.now += 4
    session[0].on_end("preempted", save_blocked_s=1.5, signal="SIGTERM")
    assert seconds_of(session[0]) == kept | {"saves": 3, "other": 2.5}
    world.now += 100

    session = world.start(10)  # an older checkpoint than the last time: the newer ones were damaged
    # of session two, its 3 steps and what came with them are lost, of session one 5 more; it was asked to end, so the
    # 100 s after it are no downtime
    kept = {"productive": 10, "lost": 5 + 5 + 11.25 + 2, "startup": 23, "down": 33, "saves": 1.5, "other": 2.5}
    assert seconds_of(session[0]) == kept
    summary = session[0].summary()
    assert (summary["sessions"], summary["lost_steps"], summary["paused_s"]) == (3, 15, 100)
    assert summary["wall_s"] == sum(kept.values()) and summary["goodput"] == pytest.approx(10 / sum(kept.values()))
    started = [event for event in read_events(world.folder / EVENTS) if event["event"] == "started"]
    assert [event["step"] for event in started] == [0, 15, 10] and started[2]["layout"] == "dp=2"


@pytest.mark.parametrize("ending", ["ended", "interrupted", "preempted", "stopped", "hung", None])
def test_a_pause_that_somebody_wanted_is_no_downtime(world: World, ending: str | None) -> None:
    """Fifty minutes of training, a night, and fifty more: goodput does not know of the night, unless the run failed.

    A guard's stop counts as a failure: the run could not go on by itself.
    """
    is_wanted = ending in ("ended", "interrupted", "preempted")
    session = world.start(0, startup_s=100)
    world.do(session, 1, 3000)
    if ending is not None:
        EventLog(world.folder / EVENTS).write(ending, session_s=3100.0)
    world.now += 36_000
    session = world.start(3000, startup_s=100)
    world.do(session, 3001, 6000)
    down = {} if is_wanted else {"down": 36_000.0}
    assert seconds_of(session[0]) == {"productive": 6000, "startup": 200} | down
    summary = session[0].summary()
    assert summary["paused_s"] == (36_000 if is_wanted else 0) and summary["wall_s"] == 6200 + sum(down.values())
    assert summary["goodput"] == pytest.approx(6000 / summary["wall_s"])
    assert ("down between sessions 85.3%" in session[0].sentence()) == (not is_wanted)


def test_nights_that_an_older_version_counted_as_down_are_none(world: World) -> None:
    """It wrote `down_s` into the `started` event whatever had happened before."""
    log = EventLog(world.folder / EVENTS)
    sessions = [
        ("started", {"step": 0, "before_s": 2.0}),
        ("ended", {"session_s": 10.0}),
        ("started", {"step": 5, "before_s": 2.0, "previous_s": 10.0, "startup_s": 2.0, "down_s": 5000.0}),
        ("saved", {"session_s": 8.0}),
        ("started", {"step": 5, "before_s": 2.0, "previous_s": 8.0, "startup_s": 2.0, "down_s": 70.0}),
        ("interrupted", {"session_s": 4.0}),
    ]
    for event, facts in sessions:
        log.write(event, **facts)
    world.now += 1000
    session = world.start(5)
    seconds = seconds_of(session[0])
    assert seconds["down"] == 70 and seconds["startup"] == 8
    assert session[0].summary()["paused_s"] == 6000 and sum(seconds.values()) == 10 + 8 + 4 + 70


@pytest.mark.parametrize(("startup_s", "steps", "is_told"), [(40, 9, False), (40, 60, True), (700, 9, True)])
def test_a_run_that_has_only_just_started_does_not_tell_its_goodput(
    world: World, startup_s: float, steps: int, is_told: bool
) -> None:
    session = world.start(0, startup_s=startup_s)
    world.do(session, 1, steps)
    sentence = session[0].sentence()
    assert ("startup" in sentence) == is_told
    assert is_told or sentence == "goodput: too short to tell: 40 s of the 49 s so far went into starting"


def test_steps_that_a_rollback_repeats_are_lost_in_the_session_and_after_it(world: World) -> None:
    session = world.start(0)
    world.do(session, 1, 10)
    world.do(session, 7, 12)
    assert seconds_of(session[0]) == {"productive": 12, "lost": 4}
    session = world.start(8)
    assert seconds_of(session[0]) == {"productive": 8, "lost": 8}
    assert session[0].summary()["lost_steps"] == 8
    lost = [event for event in read_events(world.folder / EVENTS) if event["event"] == "steps_lost"]
    assert [(event["lost_steps"], event["lost_s"]) for event in lost] == [(4, 4)]


def test_a_session_killed_before_its_first_step_was_startup_and_loses_nothing_twice(world: World) -> None:
    world.do(world.start(0), 1, 10)
    world.process_began = world.now
    Goodput(world.folder, 6, EventLog(world.folder / EVENTS).write)  # killed before metrics.jsonl was cut
    world.now += 7
    EventLog(world.folder / EVENTS).write("save_failed")  # its last sign of life
    world.now += 2
    session = world.start(6)
    assert seconds_of(session[0]) == {"productive": 6, "lost": 4, "startup": 7, "down": 2}


def test_records_without_a_time_are_lost_like_others(world: World) -> None:
    metrics = world.folder / "metrics.jsonl"
    EventLog(world.folder / EVENTS).write("started", step=0, before_s=2.0)
    metrics.write_text("".join(json.dumps({"step": step, "step_time_s": 1.0}) + "\n" for step in range(1, 11)))
    assert seconds_of(world.start(6)[0]) == {"productive": 6, "lost": 4, "startup": 2}


def test_a_clock_that_jumps_back_is_not_believed(world: World) -> None:
    session = world.start(0, startup_s=1)
    world.do(session, 1, 5)
    world.wall_offset -= 3
    world.do(session, 6, 10)
    assert seconds_of(session[0]) == {"productive": 10, "startup": 1}
    world.wall_offset -= 7200
    session = world.start(10, startup_s=1)
    assert seconds_of(session[0]) == {"productive": 10, "startup": 2}
    world.wall_offset -= 3600
    world.do(session, 11, 20)
    session = world.start(15)
    world.do(session, 16, 16)
    world.now += 4
    assert seconds_of(session[0]) == {"productive": 16, "lost": 5, "startup": 2, "other": 4}
    started = [event for event in read_events(world.folder / EVENTS) if event["event"] == "started"]
    assert [event.get("down_s", 0) for event in started] == [0, 0, 0]


YEAR_S = 365 * 86400.0


@pytest.mark.parametrize("corrected", ["in the startup", "between steps", "both ways"])
def test_a_clock_corrected_by_a_year_within_a_past_session_changes_nothing(world: World, corrected: str) -> None:
    session = world.start(0, startup_s=1)
    world.now += 4
    world.wall_offset += YEAR_S * (corrected == "in the startup")
    world.do(session, 1, 5)
    EventLog(world.folder / EVENTS).write("saved")
    world.wall_offset += YEAR_S * (corrected != "in the startup")
    world.do(session, 6, 7)
    world.wall_offset -= YEAR_S * (corrected == "both ways")
    world.do(session, 8, 10)
    world.now += 30
    session = world.start(10)
    assert seconds_of(session[0]) == {"productive": 10, "startup": 5, "down": 30}


def test_a_session_is_not_longer_than_its_own_seconds_and_an_hour(world: World) -> None:
    """What came after its last step only the clock that was set knows."""
    world.do(world.start(0, startup_s=1), 1, 10)
    world.wall_offset += YEAR_S
    EventLog(world.folder / EVENTS).write("saved")
    assert seconds_of(world.start(10)[0]) == {"productive": 10, "startup": 1, "other": goodput_module.UNRECORDED_S}


def test_records_of_an_older_version_are_bounded_by_what_their_steps_took(world: World) -> None:
    began = 1.7e9
    EventLog(world.folder / EVENTS).write("started", step=0, before_s=2.0)
    records = [{"step": step, "time": began + YEAR_S + step, "step_time_s": 1.0} for step in range(1, 11)]
    (world.folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    world.now += YEAR_S + 10
    hour = goodput_module.UNRECORDED_S
    assert seconds_of(world.start(10)[0]) == {"productive": 10, "startup": 2 + hour}


@pytest.mark.parametrize("seed", range(6))
def test_an_account_of_a_save_replaces_the_records_before_it(world: World, seed: int) -> None:
    """Of random lives with saves, rollbacks, kills and resumes from older checkpoints."""
    random, log, step, saved, began = Random(seed), EventLog(world.folder / EVENTS), 0, [0], 0
    session = world.start(0, startup_s=3)
    for _ in range(60):
        what = random.choices(["step", "save", "roll back", "kill"], [20, 5, 1, 3])[0]
        if what == "step":
            step += 1
            world.do(session, step, step, **random.choice([{}, {"skipped": True}, {"evaluation_s": 2.0}]))
        elif what == "save":
            log.write("saved", step=step, **session[0].account(step))
            saved.append(step)
        else:
            least = began + 1 if what == "roll back" else 0  # or records alone do not tell when the session had started
            back = random.choice([one for one in saved if least <= one <= step][-3:] or [0])
            if back < least:
                continue
            saved = [one for one in saved if one <= back]
            if what == "roll back":
                log.write("rolled_back", step=step, to_step=back)
            else:
                world.now += 2
                session, began = world.start(back, startup_s=random.choice([0, 5])), back
            step = back
    copy = world.folder / "copy"
    copy.mkdir()
    (copy / METRICS).write_bytes((world.folder / METRICS).read_bytes())
    events = read_events(world.folder / EVENTS)
    (copy / EVENTS).write_text("".join(json.dumps(event | {"account": None}) + "\n" for event in events))
    world.process_began = world.now
    fast, slow = (Goodput(folder, step, lambda *_, **__: None) for folder in (world.folder, copy))
    assert seconds_of(fast) == pytest.approx(seconds_of(slow))
    again = {"step": max(1, step - 3), "time": world.now + world.wall_offset, "step_time_s": 1.0}  # a rollback beyond
    assert fast.measure(again)["session_s"] == slow.measure(again)["session_s"]
    assert seconds_of(fast) == pytest.approx(seconds_of(slow))
    assert fast.summary()["lost_steps"] == slow.summary()["lost_steps"]


def test_steps_whose_records_a_power_cut_took_are_named_and_are_no_downtime(world: World) -> None:
    """The checkpoint of step 12 was on disk, the lines of its last four steps were not: they counted as down."""
    session = world.start(0, startup_s=10)
    world.do(session, 1, 12)
    account = session[0].account(12)
    saved_at, metrics = world.now + world.wall_offset, world.folder / METRICS
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:8]) + '{"step": 9, "ti')
    world.now += 30
    session = world.start(12, startup_s=1, saved_at=saved_at)
    assert seconds_of(session[0]) == {"productive": 8, "startup": 11, "down": 30, "unrecorded": 4}
    assert session[0].without_record == [[9, 12]] == read_events(world.folder / EVENTS)[-1]["without_record"]
    (sentence,) = format_steps_without_record(session[0].without_record)
    assert sentence.startswith("steps 9 to 12 have no record in metrics.jsonl: ")
    world.do(session, 13, 14)
    session = world.start(14)
    assert seconds_of(session[0])["unrecorded"] == 4
    assert metrics.read_text().count("\n") == 10  # and no half line is left
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[:5]))
    log = EventLog(world.folder / EVENTS)
    log.write("saved", step=14, **account)  # also where an account says how long they took
    assert world.start(14)[0].without_record == [[6, 14]]


NUMBERS = st.one_of(
    *(st.floats(), st.floats(min_value=0, max_value=1e3), st.integers(-(10**30), 10**30)),
    *(st.none(), st.booleans(), st.text(max_size=3)),
)
OF_RECORDS = ("time", "step_time_s", "session_s", "evaluation_s", "save_blocked_s", "self_check_s", "skipped")
OF_SESSIONS = ("time", "session_s", "before_s", "step", "previous_s", "startup_s", "down_s", "lost_s", "lost_steps")
RECORDS = st.lists(
    st.fixed_dictionaries({"step": st.integers(-3, 40)}, optional=dict.fromkeys(OF_RECORDS, NUMBERS)), max_size=12
)
EVENTS_OF_ANY_KIND = st.lists(
    st.fixed_dictionaries(
        {"event": st.sampled_from(["started", "started", "saved", "ended", "preempted", "hung"])},
        optional=dict.fromkeys((*OF_SESSIONS, "save_blocked_s"), NUMBERS),
    ),
    max_size=12,
)


def test_a_process_knows_its_age() -> None:
    code = "import time; time.sleep(0.3); from megalite.monitor.goodput import process_age_s as age; print(age())"
    began = time.monotonic()
    answer = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert 0.3 <= answer <= time.monotonic() - began + 0.02


@given(EVENTS_OF_ANY_KIND, RECORDS, RECORDS, st.integers(0, 40))
def test_shares_are_shares_whatever_the_files_and_clocks_say(
    tmp_path_factory: pytest.TempPathFactory, happened: list[Any], past: list[Any], coming: list[Any], step: int
) -> None:
    folder = tmp_path_factory.mktemp("run")
    (folder / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in happened))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in past))
    goodput = Goodput(folder, step, EventLog(folder / EVENTS).write)
    for record in [None, *coming]:
        if record is not None:
            record |= goodput.measure(record)
            assert 0 <= record["goodput"] <= 1
        shares = shares_of(goodput.seconds())
        assert set(shares) == set(CATEGORIES)
        assert all(0 <= share <= 1 for share in shares.values()), shares
        assert math.isclose(sum(shares.values()), 1, abs_tol=1e-9), shares
        goodput.sentence()
        json.dumps(goodput.summary(), allow_nan=False)


RANK_0 = """
import json, sys, time
from pathlib import Path
from megalite.monitor.events import EVENTS, EventLog
from megalite.monitor.goodput import Goodput
from megalite.monitor.sinks.jsonl import JsonLinesSink
folder, step, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
time.sleep(0.2)
goodput = Goodput(folder, step, EventLog(folder / EVENTS).write)
sink = JsonLinesSink(folder / "metrics.jsonl", step)
while step < last:
    began = time.perf_counter()
    time.sleep(0.05)
    step += 1
    record = {"step": step, "time": time.time(), "step_time_s": time.perf_counter() - began}
    record |= goodput.measure(record)
    sink.on_step(record)
goodput.on_end("ended")
print(json.dumps([goodput.seconds(), time.time()]))
"""


def test_a_killed_process_and_its_successor_account_for_the_real_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANK_0, str(tmp_path)]
    began = time.time()
    first = subprocess.Popen([*command, "0", "1000"])
    metrics = tmp_path / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 10:
        assert first.poll() is None
        time.sleep(0.005)
    first.send_signal(signal.SIGKILL)
    first.wait()
    killed = time.time()
    time.sleep(0.5)
    resumed = time.time()
    second = subprocess.run([*command, "6", "16"], check=True, capture_output=True)
    seconds, ended = json.loads(second.stdout)
    assert seconds["productive"] == pytest.approx(16 * 0.05, rel=0.3)
    assert 4 * 0.05 <= seconds["lost"] <= 0.3 + killed - began
    assert 0.4 < seconds["startup"] < 0.4 + ended - began
    # the step that the kill interrupted counts as down: nobody knows of it
    assert resumed - killed - 0.02 <= seconds["down"] <= resumed - killed + 0.5
    assert sum(seconds.values()) == pytest.approx(ended - began, abs=0.5)
