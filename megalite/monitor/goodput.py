"""Goodput: the share of a run's wall time that went into steps that count, over all its sessions.

Everything is derived from two files of the run folder, so it survives restarts: metrics.jsonl holds the time of each
step, and the `started` event of each session the account of the session before it, including the steps that the resume
drops from metrics.jsonl. Within a session time is monotonic, and each record and end event carries it; between sessions
only the system's clock is known. If that clock jumps, no share gets negative or larger than one, and no session longer
than its own seconds and an hour.

All durations are in seconds (`_s`), all points in time in unix seconds.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from megalite.monitor.events import EVENTS, read_events
from megalite.monitor.line_files import LONGEST_LINE_BYTES
from megalite.monitor.observer import Observer
from megalite.monitor.records.step import StepRecord
from megalite.monitor.sinks.jsonl import METRICS, stream_records
from megalite.units import plural, rounded

log = logging.getLogger(__name__)
Event = Mapping[str, Any]
Record = Mapping[str, Any]

CATEGORIES = {  # in the order of `Goodput.sentence`
    "productive": "steps that count",
    "lost": "lost work",
    "skipped": "skipped steps",
    "evaluation": "evaluation",
    "saves": "blocked by saves",
    "checks": "self-checks",
    "startup": "startup",
    "down": "down between sessions",
    "unrecorded": "steps without a record",
    "other": "other",
}
AFTER_THE_STEP = {"evaluation_s": "evaluation", "save_blocked_s": "saves", "self_check_s": "checks"}
ENDS = ("ended", "preempted", "stopped", "interrupted")  # events that end a session without a failure
ON_REQUEST = ("ended", "preempted", "interrupted")  # of these: the pause that follows is wanted, and no downtime
# longest time of a session that only the system's clock shows: the watchdog ends a start after 30 min
UNRECORDED_S = 3600.0
REMEMBERED_STEPS = 20_000  # of further ones the records are read again where a rollback reaches them
OF_STEPS = ("productive", "skipped", "evaluation", "saves", "checks")  # categories of a step's record
LONGEST_S = 1e10  # 300 years: sums of anything a file may say stay finite
MOST_STRETCHES = 5  # of steps without a record that are named
SHORT_S = 600.0  # shares of a shorter run that spent most of its time on its start tell nothing


class Goodput(Observer):
    """Accounts for the wall time of one run; on rank 0.

    Make it before metrics.jsonl is opened for writing: it counts the steps beyond `resumed_step` as lost, and writes
    that into the session's `started` event with `write`, which is `EventLog.write` or a wrapper of it. `facts` go there
    too.
    """

    name = "goodput"

    def __init__(
        self, run_dir: Path, resumed_step: int, write: Callable[..., None], saved_at: float = 0.0, **facts: Any
    ) -> None:
        """`saved_at` is when the checkpoint was written that the session goes on from, in unix seconds."""
        self._began, self._write = time.monotonic(), write
        self._before_s = process_age_s()
        events = read_events(run_dir / EVENTS)
        account = last_account(events, resumed_step)
        self._steps = _Steps(account, run_dir / METRICS)
        newest = list(stream_records(run_dir / METRICS, LONGEST_LINE_BYTES))[-1:]
        past = PastSteps(events, resumed_step, account, _seconds(newest[0].get("step")) if newest else 0.0)
        for record in stream_records(run_dir / METRICS, after_step=past.after_step):
            past.add(record)
            if account.step < _seconds(record.get("step")) <= resumed_step:
                self._steps.add(record)
        restart = past.look_back(time.time() - self._before_s, saved_at)
        self.without_record = past.without_record()
        self._past = past_seconds([*events, restart])
        self.lost_steps = sum(int(_seconds(event.get("lost_steps"))) for event in [*events, restart])
        self.sessions = 1 + len(_sessions(events))
        self._startup_s: float | None = None  # known when the first step has ended
        missing = {"without_record": self.without_record} if self.without_record else {}
        write("started", step=resumed_step, before_s=self._before_s, **restart, **missing, **facts)

    def measure(self, record: StepRecord) -> StepRecord:
        """Takes the record of a step that has just ended; returns `goodput`, the run's so far.

        Reads `time` (when the step ended), `step_time_s`, `skipped` and the durations of what came after the step:
        `evaluation_s`, `save_blocked_s`, `self_check_s`. Returns `session_s` too: the age of the process in seconds.
        All of these must be in metrics.jsonl as well.
        """
        if self._startup_s is None:
            self._startup_s = _seconds(self._session_s() - sum(step_seconds(record).values()))
        lost_s, lost_steps = self._steps.add(record)
        if lost_steps:  # metrics.jsonl drops them now: the next session reads of them here
            lost = {"session_s": round(self._session_s(), 3), "lost_s": lost_s, "lost_steps": lost_steps}
            self._write("steps_lost", step=record["step"], **lost)
        return self.so_far()

    def so_far(self) -> StepRecord:
        """Returns the fields of a record that tell the account of the steps so far."""
        return {"session_s": round(self._session_s(), 3), "goodput": round(shares_of(self.seconds())["productive"], 4)}

    def account(self, step: int) -> dict[str, Any]:
        """Returns the seconds of all steps up to a recent one, for its `saved` event: from there a resume goes on."""
        seconds = self._steps.until(step)
        if seconds is None or self._startup_s is None:
            return {}
        rounded = {name: round(value, 3) for name, value in seconds.items() if value}
        return {"account": rounded | {"startup": round(self._startup_s, 3)}}

    def on_end(self, ending: str, *, save_blocked_s: float = 0.0, **facts: Any) -> None:
        """Writes the event `ending`, one of ENDS, with the account of the session, and logs the run's."""
        self._past["saves"] += _seconds(save_blocked_s)
        log.info(self.sentence())  # first: it does not depend on a file that can be written
        self._write(ending, save_blocked_s=save_blocked_s, **self.so_far(), **facts)

    def seconds(self) -> dict[str, float]:
        """Returns the wall time of the run so far by category; what no category explains is `other`."""
        known = {name: self._past[name] + self._steps.seconds.get(name, 0.0) for name in CATEGORIES}
        known["startup"] += self._session_s() if self._startup_s is None else self._startup_s
        seconds = {name: max(0.0, value) for name, value in known.items()} | {"other": 0.0}
        seconds["other"] = max(0.0, self._past["wall"] + self._session_s() - sum(seconds.values()))
        return seconds

    def summary(self) -> dict[str, Any]:
        """Returns the account for receipt.json."""
        seconds = self.seconds()
        return {
            "goodput": shares_of(seconds)["productive"],
            "sessions": self.sessions,
            "lost_steps": self.lost_steps + self._steps.lost_steps,
            "wall_s": round(sum(seconds.values()), 3),
            "paused_s": round(self._past["paused"], 3),  # after sessions that ended on request; no part of `wall_s`
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
        }

    def sentence(self) -> str:
        """Returns one line for the console, without categories below a thousandth."""
        seconds = self.seconds()
        shares, wall_s = shares_of(seconds), sum(seconds.values())
        if wall_s < SHORT_S and shares["startup"] > 0.5:
            start = rounded(wall_s * shares["startup"])
            return f"goodput: too short to tell: {start} of the {rounded(wall_s)} so far went into starting"
        parts = [f"{label} {shares[name]:.1%}" for name, label in CATEGORIES.items() if shares[name] >= 0.001]
        sessions = plural(self.sessions, "session")
        return f"goodput {shares['productive']:.1%} of {rounded(wall_s)} in {sessions}: {', '.join(parts)}"

    def _session_s(self) -> float:
        return self._before_s + time.monotonic() - self._began


def process_age_s() -> float:
    """Returns the age of this process, by a clock that cannot be set."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # man 5 proc: starttime
    return _seconds(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


class Account(NamedTuple):
    """Sums of all steps up to one, as its `saved` event has them."""

    step: float = 0.0
    seconds: Mapping[str, float] = {}  # by category


def last_account(events: Sequence[Event], resumed_step: float) -> Account:
    """Returns the newest account of which every step is still on record; an empty one where there is none."""
    latest = resumed_step  # later steps have been done again since, or are now
    for event in reversed(events):
        known, step = event.get("account"), _seconds(event.get("step"))
        if isinstance(known, dict) and step <= latest:
            return Account(step, {name: _seconds(known.get(name)) for name in OF_STEPS})
        if event["event"] in ("started", "rolled_back"):
            latest = min(latest, _seconds(event.get("to_step", step)))
    return Account()


class PastSteps:
    """Sums of the records of the last session and of later steps; each record is taken once and not kept."""

    def __init__(self, events: Sequence[Event], resumed_step: float, account: Account, newest: float) -> None:
        """`newest` is the last step that has a record."""
        self._sessions, self._resumed = _sessions(events), resumed_step
        self._first = self._sessions[-1][0] if self._sessions else {}
        self._resumed_then = _seconds(self._first.get("step"))
        self.after_step = max(0.0, account.step - 1)  # records are wanted from that of the account on
        self._own_s = 0.0
        self._own_first: Record = {}  # of the last session, as the next
        self._own_last: Record = {}
        self._sign = (-1.0, 0.0)  # the largest `session_s` of the session's records, and the time of its end
        self._clocked = 0.0  # the latest time of a record without
        self._lost, self._own_lost = [0.0, 0], [0.0, 0]  # seconds and number of steps
        self._last_beyond: Record = {}
        self._next = min(account.step, newest) + 1  # earlier steps have a record
        self._gaps: list[list[int]] = []  # first and last of steps without a record

    def add(self, record: Record) -> None:
        """Takes a record; those behind `after_step` are wanted, in their order."""
        step, seconds = _seconds(record.get("step")), sum(step_seconds(record).values())
        if step > self._next:
            self._gaps.append([int(self._next), int(step) - 1])
        self._next = max(self._next, step + 1)
        if step > self._resumed_then:
            self._own_first = self._own_first or record
            self._own_s, self._own_last = self._own_s + seconds, record
            ended = sum(_seconds(record.get(key)) for key in ("time", *AFTER_THE_STEP))
            if "session_s" not in record:
                self._clocked = max(self._clocked, ended)
            elif "time" in record:
                self._sign = max((_seconds(record["session_s"]), ended), self._sign, key=itemgetter(0))
        if step > self._resumed:
            lost, self._last_beyond = self._own_lost if step > self._resumed_then else self._lost, record
            lost[0], lost[1] = lost[0] + seconds, lost[1] + 1

    def without_record(self) -> list[list[int]]:
        """Returns the first and the last step of each stretch that is in the checkpoint and on no record."""
        gaps = [*self._gaps, *[[int(self._next), int(self._resumed)]] * (self._next <= self._resumed)]
        return [gap for gap in gaps if gap[1] <= self._resumed]

    def look_back(self, process_began: float, saved_at: float) -> dict[str, float | None]:
        """Returns the account of the last session for the `started` event of the next.

        `previous_s`: how long it lived, until the last recorded event or step; `startup_s`: until its first step
        began; `down_s`: from its end to `process_began`, or `paused_s` if it had ended on request; `lost_s`,
        `lost_steps`: in steps that are dropped now; `last_dropped`: the time of the last of them; `unrecorded_s`: from
        its last record to `saved_at`, where steps of the checkpoint have none.
        """
        if not self._sessions:
            return {}
        last_dropped = self._first.get("last_dropped")
        if last_dropped is not None and self._own_last.get("time", object()) == last_dropped:
            # that session died before it dropped the steps it counted as lost; they must not be counted twice
            self._own_s, self._own_first, self._own_lost = 0.0, {}, [0.0, 0]
            self._sign, self._clocked = (-1.0, 0.0), 0.0
        previous_s, ended = self._life()
        unrecorded_s = 0.0
        if self._next <= self._resumed and ended < saved_at <= process_began:
            unrecorded_s = min(saved_at - ended, UNRECORDED_S)
        is_wanted = any(event.get("event") in ON_REQUEST for event in self._sessions[-1])
        return {
            "previous_s": previous_s + unrecorded_s,
            "startup_s": min(self._until_first_step_s(previous_s), previous_s),
            "paused_s" if is_wanted else "down_s": _seconds(process_began - ended - unrecorded_s),
            "lost_s": self._lost[0] + self._own_lost[0],
            "lost_steps": self._lost[1] + self._own_lost[1],
            "last_dropped": self._last_beyond.get("time"),
            **({"unrecorded_s": unrecorded_s} if unrecorded_s else {}),
        }

    def _life(self) -> tuple[float, float]:
        """Returns how long the last session lived and the time of its last record."""
        first, later = self._first, self._sessions[-1][1:]
        lived_s, when = _seconds(first.get("before_s")), _seconds(first.get("time"))
        shortest_s = lived_s + self._own_s
        signs = [
            (_seconds(event["session_s"]), _seconds(event["time"]))
            for event in later
            if "session_s" in event and "time" in event
        ]
        for session_s, time_s in [*signs, self._sign]:  # a record's seconds are those when all was done after the step
            if session_s >= lived_s:
                lived_s, when = session_s, time_s
        # records without `session_s`: only the system's clock shows how much later they are, if it has not been set
        clocked = [_seconds(event.get("time")) for event in later[-1:] if "session_s" not in event]
        ended = max([when, self._clocked, *clocked])
        shortest_s = max(shortest_s, lived_s)
        return min(max(lived_s + ended - when, shortest_s), shortest_s + UNRECORDED_S), ended

    def _until_first_step_s(self, previous_s: float) -> float:
        first, before_s = self._own_first, _seconds(self._first.get("before_s"))
        for event in self._sessions[-1]:
            if isinstance(known := event.get("account"), dict):
                return _seconds(known.get("startup"))
        if not first:
            return previous_s
        if "session_s" in first:
            return max(_seconds(first["session_s"]) - sum(step_seconds(first).values()), before_s)
        began = _seconds(first.get("time")) - _seconds(first.get("step_time_s"))
        return before_s + min(_seconds(began - _seconds(self._first.get("time"))), UNRECORDED_S)


def past_seconds(events: Iterable[Event]) -> dict[str, float]:
    """Returns the seconds of all earlier sessions by category, `wall`, their sum, and `paused`, which is no part of it.

    The input is their events. Older versions wrote every pause as `down_s`.
    """
    seconds = dict.fromkeys([*CATEGORIES, "wall", "paused"], 0.0)
    is_wanted = False  # the pause after the session so far
    for event in events:
        down_s = _seconds(event.get("down_s"))
        seconds["paused" if is_wanted else "down"] += down_s
        seconds["paused"] += _seconds(event.get("paused_s"))
        seconds["wall"] += _seconds(event.get("previous_s")) + (0.0 if is_wanted else down_s)
        for name in ("startup", "lost", "unrecorded"):
            seconds[name] += _seconds(event.get(f"{name}_s"))
        if event.get("event") in ENDS:
            seconds["saves"] += _seconds(event.get("save_blocked_s"))
        is_wanted = event.get("event") in ON_REQUEST or (is_wanted and event.get("event") != "started")
    return seconds


def step_seconds(record: Record) -> dict[str, float]:
    """Returns the seconds of a step's record by category."""
    seconds = {"skipped" if record.get("skipped") else "productive": _seconds(record.get("step_time_s"))}
    return seconds | {name: _seconds(record.get(key)) for key, name in AFTER_THE_STEP.items() if key in record}


def shares_of(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns each category's part of the sum; all of it is `other` if no time has passed."""
    total = math.fsum(seconds.values())
    if total <= 0:
        return {name: float(name == "other") for name in seconds}
    return {name: value / total for name, value in seconds.items()}


class _Steps:
    """Time of the steps that count; repeating a step after a rollback makes its earlier time and what followed lost."""

    def __init__(self, account: Account, metrics: Path) -> None:
        self.seconds = {**dict.fromkeys(CATEGORIES, 0.0), **account.seconds}
        self.lost_steps = 0
        self._metrics, self._summed_up = metrics, account.step  # steps up to here are in the file alone
        self._recent: deque[tuple[float, dict[str, float]]] = deque()

    def add(self, record: Record) -> tuple[float, int]:
        """Adds a record; returns the seconds and the number of steps that are lost by it."""
        step, lost_before = _seconds(record.get("step")), (self.seconds["lost"], self.lost_steps)
        while self._recent and self._recent[-1][0] >= step:
            self._lose(self._recent.pop()[1])
        if step <= self._summed_up:
            for older in stream_records(self._metrics, after_step=step - 1):
                if step <= _seconds(older.get("step")) <= self._summed_up:
                    self._lose(step_seconds(older))
            self._summed_up = step - 1
        parts = step_seconds(record)
        for name, value in parts.items():
            self.seconds[name] += value
        self._recent.append((step, parts))
        if len(self._recent) > REMEMBERED_STEPS:
            self._summed_up = self._recent.popleft()[0]
        return self.seconds["lost"] - lost_before[0], self.lost_steps - lost_before[1]

    def until(self, step: float) -> dict[str, float] | None:
        """Returns the seconds by category of the steps up to one; None if it is too long ago."""
        seconds = {name: self.seconds[name] for name in OF_STEPS}
        for _, parts in takewhile(lambda recent: recent[0] > step, reversed(self._recent)):
            for name, value in parts.items():
                seconds[name] -= value
        return seconds if step >= self._summed_up else None

    def _lose(self, parts: Mapping[str, float]) -> None:
        self.lost_steps += 1
        for name, value in parts.items():
            self.seconds[name] -= value
            self.seconds["lost"] += value


def format_steps_without_record(stretches: Sequence[Sequence[int]]) -> list[str]:
    """Returns a sentence about the first and last steps of stretches that have no record; none where there are none."""
    if not stretches:
        return []
    named = [f"{first:,} to {last:,}" if last > first else f"{first:,}" for first, last in stretches[:MOST_STRETCHES]]
    more = " and others" * (len(stretches) > MOST_STRETCHES)
    return [
        f"steps {', '.join(named)}{more} have no record in {METRICS}: they are done and in the checkpoint, but their "
        "numbers were lost, with the power of the machine or while storage refused them"
    ]


def _sessions(events: Sequence[Event]) -> list[list[Event]]:
    """Returns the events of each session, its `started` first."""
    sessions: list[list[Event]] = []
    for event in events:
        if event.get("event") == "started":
            sessions.append([event])
        elif sessions:
            sessions[-1].append(event)
    return sessions


def _seconds(value: Any) -> float:
    """Returns a number from a file, or a difference of clocks, clamped to [0, LONGEST_S]; 0 for anything else."""
    if not isinstance(value, (int, float)) or not value > 0:  # NaN is not > 0 either
        return 0.0
    return float(min(value, LONGEST_S))
