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
from pathlib import Path
from typing import Any

from megalite.monitor.events import EVENTS, read_events
from megalite.monitor.observer import Observer
from megalite.monitor.progress import duration
from megalite.monitor.sinks.jsonl import read_records
from megalite.planner.units import plural

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
    "other": "other",
}
AFTER_THE_STEP = {"evaluation_s": "evaluation", "save_blocked_s": "saves", "self_check_s": "checks"}
ENDS = ("ended", "preempted", "stopped", "interrupted")  # events that end a session without a failure
ON_REQUEST = ("ended", "preempted", "interrupted")  # of these: the pause that follows is wanted, and no downtime
# longest time of a session that only the system's clock shows: the watchdog ends a start after 30 min
UNRECORDED_S = 3600.0
REMEMBERED_STEPS = 20_000  # a rollback reaches no further back
LONGEST_S = 1e10  # 300 years: sums of anything a file may say stay finite
SHORT_S = 600.0  # shares of a shorter run that spent most of its time on its start tell nothing


class Goodput(Observer):
    """Accounts for the wall time of one run; on rank 0.

    Make it before metrics.jsonl is opened for writing: it counts the steps beyond `resumed_step` as lost, and writes
    that into the session's `started` event with `write`, which is `EventLog.write` or a wrapper of it. `facts` go there
    too.
    """

    name = "goodput"

    def __init__(self, run_dir: Path, resumed_step: int, write: Callable[..., None], **facts: Any) -> None:
        self._began, self._write = time.monotonic(), write
        self._before_s = process_age_s()
        events, records = read_events(run_dir / EVENTS), read_records(run_dir / "metrics.jsonl")
        restart = look_back(events, records, resumed_step, process_began=time.time() - self._before_s)
        self._past = past_seconds([*events, restart])
        self.lost_steps = sum(int(_seconds(event.get("lost_steps"))) for event in [*events, restart])
        self.sessions = 1 + len(_sessions(events))
        self._startup_s: float | None = None  # known when the first step has ended
        self._steps = _Steps()
        for record in records:
            if _seconds(record.get("step")) <= resumed_step:
                self._steps.add(record)
        write("started", step=resumed_step, before_s=self._before_s, **restart, **facts)

    def on_step(self, record: dict[str, Any]) -> None:
        """Takes the record of a step that has just ended; adds `goodput`, the run's so far.

        Reads `time` (when the step ended), `step_time_s`, `skipped` and the durations of what came after the step:
        `evaluation_s`, `save_blocked_s`, `self_check_s`. Adds `session_s` too: the age of the process in seconds. All
        of these must be in metrics.jsonl as well.
        """
        record["session_s"] = round(self._session_s(), 3)
        if self._startup_s is None:
            self._startup_s = _seconds(self._session_s() - sum(step_seconds(record).values()))
        lost_s, lost_steps = self._steps.add(record)
        if lost_steps:  # metrics.jsonl drops them now: the next session reads of them here
            self._write("steps_lost", session_s=record["session_s"], lost_s=lost_s, lost_steps=lost_steps)
        record["goodput"] = round(self.shares()["productive"], 4)

    def on_end(self, ending: str, *, save_blocked_s: float = 0.0, **facts: Any) -> None:
        """Writes the event `ending`, one of ENDS, with the account of the session, and logs the run's."""
        self._past["saves"] += _seconds(save_blocked_s)
        ours = {"session_s": round(self._session_s(), 3), "goodput": self.shares()["productive"]}
        log.info(self.sentence())  # first: it does not depend on a file that can be written
        self._write(ending, save_blocked_s=save_blocked_s, **ours, **facts)

    def seconds(self) -> dict[str, float]:
        """Returns the wall time of the run so far by category; what no category explains is `other`."""
        known = {name: self._past[name] + self._steps.seconds.get(name, 0.0) for name in CATEGORIES}
        known["startup"] += self._session_s() if self._startup_s is None else self._startup_s
        seconds = {name: max(0.0, value) for name, value in known.items()} | {"other": 0.0}
        seconds["other"] = max(0.0, self._past["wall"] + self._session_s() - sum(seconds.values()))
        return seconds

    def shares(self) -> dict[str, float]:
        """Returns the parts of the wall time by category; they sum to one."""
        return shares_of(self.seconds())

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
        shares, wall_s = self.shares(), sum(self.seconds().values())
        if wall_s < SHORT_S and shares["startup"] > 0.5:
            start = duration(wall_s * shares["startup"])
            return f"goodput: too short to tell: {start} of the {duration(wall_s)} so far went into starting"
        parts = [f"{label} {shares[name]:.1%}" for name, label in CATEGORIES.items() if shares[name] >= 0.001]
        sessions = plural(self.sessions, "session")
        return f"goodput {shares['productive']:.1%} of {duration(wall_s)} in {sessions}: {', '.join(parts)}"

    def _session_s(self) -> float:
        return self._before_s + time.monotonic() - self._began


def process_age_s() -> float:
    """Returns the age of this process, by a clock that cannot be set."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])  # man 5 proc: starttime
    return _seconds(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def look_back(
    events: Sequence[Event], records: Sequence[Record], resumed_step: int, process_began: float
) -> dict[str, float | None]:
    """Returns the account of the last session for the `started` event of the next, which resumes at `resumed_step`.

    `previous_s`: how long it lived, until the last recorded event or step; `startup_s`: until its first step
    began; `down_s`: from its end to `process_began`, or `paused_s` if it had ended on request; `lost_s`, `lost_steps`:
    in steps that are dropped now; `last_dropped`: the time of the last of them.
    """
    sessions = _sessions(events)
    if not sessions:
        return {}
    first, *later = sessions[-1]
    resumed_then, last_dropped = _seconds(first.get("step")), first.get("last_dropped")
    own = [record for record in records if _seconds(record.get("step")) > resumed_then]
    if own and last_dropped is not None and own[-1].get("time") == last_dropped:
        own = []  # that session died before it dropped the steps it counted as lost; they must not be counted twice
    beyond = [record for record in records if _seconds(record.get("step")) > resumed_step]
    lost = [record for record in beyond if _seconds(record.get("step")) <= resumed_then]
    lost += [record for record in own if _seconds(record.get("step")) > resumed_step]
    previous_s, ended = _life(first, later, own)
    is_wanted = any(event.get("event") in ON_REQUEST for event in later)
    return {
        "previous_s": previous_s,
        "startup_s": min(_until_first_step_s(first, own), previous_s) if own else previous_s,
        "paused_s" if is_wanted else "down_s": _seconds(process_began - ended),
        "lost_s": _total_s(lost),
        "lost_steps": len(lost),
        "last_dropped": beyond[-1].get("time") if beyond else None,
    }


def _life(first: Event, later: Sequence[Event], own: Sequence[Record]) -> tuple[float, float]:
    """Returns how long a session lived and the time of its last record.

    `first` is its `started` event, `later` the events after it, `own` the records of its steps.
    """
    lived_s, when = _seconds(first.get("before_s")), _seconds(first.get("time"))
    shortest_s = lived_s + _total_s(own)
    signs = [(event, 0.0) for event in later] + [(record, _after_the_step_s(record)) for record in own]
    for sign, after_s in signs:  # a record's time is the end of its step; its seconds are those when all was done
        if "session_s" in sign and "time" in sign and _seconds(sign["session_s"]) >= lived_s:
            lived_s, when = _seconds(sign["session_s"]), _seconds(sign["time"]) + after_s
    # records without `session_s`: only the system's clock shows how much later they are, if it has not been set
    clocked = [_seconds(event.get("time")) for event in later[-1:] if "session_s" not in event]
    clocked += [_seconds(record.get("time")) + _after_the_step_s(record) for record in own if "session_s" not in record]
    ended = max([when, *clocked])
    shortest_s = max(shortest_s, lived_s)
    return min(max(lived_s + ended - when, shortest_s), shortest_s + UNRECORDED_S), ended


def _until_first_step_s(first: Event, own: Sequence[Record]) -> float:
    before_s = _seconds(first.get("before_s"))
    if "session_s" in own[0]:
        return max(_seconds(own[0]["session_s"]) - _total_s(own[:1]), before_s)
    began = _seconds(own[0].get("time")) - _seconds(own[0].get("step_time_s"))
    return before_s + min(_seconds(began - _seconds(first.get("time"))), UNRECORDED_S)


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
        for name in ("startup", "lost"):
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

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CATEGORIES, 0.0)
        self.lost_steps = 0
        self._recent: deque[tuple[float, dict[str, float]]] = deque(maxlen=REMEMBERED_STEPS)

    def add(self, record: Record) -> tuple[float, int]:
        """Adds a record; returns the seconds and the number of steps that are lost by it."""
        step, lost_before = _seconds(record.get("step")), (self.seconds["lost"], self.lost_steps)
        while self._recent and self._recent[-1][0] >= step:
            _, done_again = self._recent.pop()
            self.lost_steps += 1
            for name, value in done_again.items():
                self.seconds[name] -= value
                self.seconds["lost"] += value
        parts = step_seconds(record)
        for name, value in parts.items():
            self.seconds[name] += value
        self._recent.append((step, parts))
        return self.seconds["lost"] - lost_before[0], self.lost_steps - lost_before[1]


def _sessions(events: Sequence[Event]) -> list[list[Event]]:
    """Returns the events of each session, its `started` first."""
    sessions: list[list[Event]] = []
    for event in events:
        if event.get("event") == "started":
            sessions.append([event])
        elif sessions:
            sessions[-1].append(event)
    return sessions


def _total_s(records: Iterable[Record]) -> float:
    return sum(sum(step_seconds(record).values()) for record in records)


def _after_the_step_s(record: Record) -> float:
    return sum(_seconds(record.get(key)) for key in AFTER_THE_STEP)


def _seconds(value: Any) -> float:
    """Returns a number from a file, or a difference of clocks, clamped to [0, LONGEST_S]; 0 for anything else."""
    if not isinstance(value, (int, float)) or not value > 0:  # NaN is not > 0 either
        return 0.0
    return float(min(value, LONGEST_S))
