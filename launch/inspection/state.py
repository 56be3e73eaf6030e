"""Judges the state of a run by its traces: its lock, its heartbeats, the events and steps that it wrote down."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from launch.runtime.run_lock import LockHolder, is_locked
from megalite.resilience.heartbeat import beat_times
from megalite.units import rounded

SILENT_S = 60.0  # heartbeats come every 2 to 10 s; as `megalite supervise --silence`


class RunState(StrEnum):
    """The states of a run, as `megalite status` and `megalite ls` name them."""

    RUNNING = "running"
    WAITING = "waiting"
    ENDED = "ended"
    INTERRUPTED = "stopped by a person"
    PREEMPTED = "preempted"
    STOPPED = "stopped by a guard"
    HUNG = "hung"
    FAILED = "failed"
    NOT_STARTED = "not started"
    UNREADABLE = "unreadable"

    @property
    def is_healthy(self) -> bool:
        """True if the run makes progress, is about to, or has ended as it should."""
        return self in (RunState.RUNNING, RunState.WAITING, RunState.ENDED)


ENDINGS = {  # event that ends a session -> state, and what happened
    "ended": (RunState.ENDED, "all steps are done"),
    "interrupted": (RunState.INTERRUPTED, "somebody pressed Ctrl-C"),
    "preempted": (RunState.PREEMPTED, "it was asked to end, by a signal or its time limit, and saved its state"),
    "stopped": (RunState.STOPPED, "a guard or a self-check ended it"),
    "hung": (RunState.HUNG, "the watchdog ended it"),
}


@dataclass(frozen=True)
class Traces:
    """The traces of a run that its state depends on."""

    is_alive: bool | None  # None: its process is on another host, whose locks cannot be seen here
    since_last_write_s: float  # since the last step, event or start that it wrote down
    limit_s: float  # within which the next one must come
    has_started: bool = False  # any session
    has_stepped: bool = False  # the last session
    ending: str | None = None  # event that ended the last session, one of ENDINGS
    is_started_again: bool = False  # a process took the lock after `ending`
    restart: str = ""  # a supervisor's announcement to start it again
    failed_save: str = ""  # why the last thing that the last session did, a save, failed
    unread: str = ""  # why none of its events can be read
    error: str = ""  # that a rank of the last start has left
    logs: str = "the output of the command that started it"  # where more can be read
    is_evaluating: bool = False  # its last step, which was saved before


def infer_state(traces: Traces) -> tuple[RunState, str]:
    """Returns the state and a sentence with what it follows from."""
    silent, limit = rounded(traces.since_last_write_s), rounded(traces.limit_s)
    why = f": {traces.error}" if traces.error else ""
    is_alive = traces.since_last_write_s <= traces.limit_s if traces.is_alive is None else traces.is_alive
    if not is_alive and traces.restart:
        return RunState.WAITING, f"its supervisor starts it again: {traces.restart}"
    if traces.ending is not None and not (is_alive and traces.is_started_again):
        return ENDINGS[traces.ending]
    if not is_alive and traces.unread:
        return (
            RunState.UNREADABLE,
            f"{traces.unread}, so how its last session ended is not known{why}; see {traces.logs}",
        )
    if not is_alive and not traces.has_started:
        return RunState.NOT_STARTED, f"it ended before its first step{why}; see {traces.logs}"
    if traces.is_alive is False and (traces.is_started_again or not traces.has_stepped):
        return RunState.FAILED, f"its last start ended before its first step{why}; see {traces.logs}"
    if not is_alive and traces.failed_save:
        return RunState.FAILED, f"its state could not be saved: {traces.failed_save}"
    if not is_alive:
        gone = "it has given no sign of life" if traces.is_alive is None else "its process is gone; it wrote nothing"
        return RunState.FAILED, f"{gone} for {silent} and wrote down no end of its last session{why}"
    unseen = ", by its files: locks of its host cannot be seen here" if traces.is_alive is None else ""
    if traces.since_last_write_s > traces.limit_s:
        return RunState.HUNG, f"its process lives, but wrote nothing for {silent}; the watchdog's limit is {limit}"
    if not traces.has_stepped:
        return RunState.WAITING, f"it starts: no step of this session has ended yet, after {silent}{unseen}"
    evaluates = "it evaluates after its last step: " if traces.is_evaluating else ""
    return RunState.RUNNING, f"{evaluates}its last step, event or save was {silent} ago{unseen}"


def is_alive(run_dir: Path, holder: LockHolder | None, host: str | None) -> bool | None:
    """Returns whether the process that holds a run's lock exists, on whichever host; None where that cannot be told.

    `holder` is who took the lock last, `host` where the run was if that is not known.
    """
    locked = is_locked(run_dir)
    if locked:
        return True
    since = holder.time if holder is not None else 0.0
    silences_s = [age_s for written, age_s in beat_times(run_dir) if written >= since]
    if silences_s:  # of the ranks of a supervised attempt, which remove their files when they leave
        return min(silences_s) < SILENT_S
    if holder is not None and (lives := holder.is_alive()) is not None:
        return lives
    is_here = (holder.host if holder is not None else host) in (None, socket.gethostname())
    return False if is_here and locked is not None else None
