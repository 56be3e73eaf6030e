"""Reads how far a run has come, and with which exit code it really ended, from what it left in its folder.

A launcher's exit code is unreliable: torchrun turns every exit code of its ranks into 1, `deepspeed` exits with 0 when
its ranks were killed, and a shell script may return anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from launch.errors import FAILED_CODE, HUNG_CODE, INTERRUPTED_CODE, PREEMPTED_CODE, STOPPED_CODE
from megalite.checkpoint.manifest import find_latest, read_manifest
from megalite.monitor.events import EVENTS
from megalite.monitor.line_files import LONGEST_LINE_BYTES, stream_lines
from megalite.monitor.sinks.jsonl import METRICS, stream_records

EXIT_CODES = {  # events that end a session -> exit code
    "ended": 0,
    "preempted": PREEMPTED_CODE,
    "stopped": STOPPED_CODE,
    "hung": HUNG_CODE,
    "interrupted": INTERRUPTED_CODE,
}


@dataclass(frozen=True)
class RunProgress:
    """The progress of a run, as its folder told it at one moment."""

    checkpoint: int | None = None  # step of the newest complete checkpoint
    tokens_seen: int = 0  # by that checkpoint
    step: int = 0  # the last step logged; 0: none
    last_record: str = ""  # in full, since a repeated step differs in its time only
    sessions: int | None = None  # number of starts so far; None: there is no events.jsonl
    resumed_step: int = 0  # first step of the last session
    last_event: str | None = None  # the event that ended the last session; None: there is none

    @classmethod
    def read(cls, run_dir: Path, report: Callable[[str], object] = str) -> RunProgress | None:
        """Reads a run's folder; None if it is unreadable, which says nothing about the run; `report` is told why."""
        try:
            newest, _ = find_latest(run_dir)
            manifest = read_manifest(newest) if newest else None
            records = list(stream_records(run_dir / METRICS, LONGEST_LINE_BYTES))[-1:]
            sessions, resumed_step, last_event = None, 0, None
            if (run_dir / EVENTS).is_file():
                sessions = 0
                for event in stream_lines(run_dir / EVENTS):
                    if event.get("event") == "started":
                        sessions, resumed_step, last_event = sessions + 1, int(event.get("step", 0)), None
                    elif event.get("event") in EXIT_CODES:
                        last_event = event["event"]
            return cls(
                checkpoint=manifest.step if manifest else None,
                tokens_seen=int(manifest.state.get("tokens_seen", 0)) if manifest else 0,
                step=int(records[-1]["step"]) if records else 0,
                last_record=json.dumps(records[-1]) if records else "",
                sessions=sessions,
                resumed_step=resumed_step,
                last_event=last_event,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            report(f"{type(error).__name__}: {error}")
            return None

    def has_new_session(self, before: RunProgress) -> bool:
        """Returns whether ranks have recorded a start since `before`."""
        return (self.sessions or 0) > (before.sessions or 0)

    def has_trained(self, before: RunProgress) -> bool:
        """Returns whether a step has ended since `before`."""
        if self.sessions is None:  # not a run of ours, or it could not write events
            return (self.last_record, self.checkpoint) != (before.last_record, before.checkpoint)
        # between `started` and the first record, the last record is of the previous session
        return self.has_new_session(before) and self.step > self.resumed_step and self.last_record != before.last_record

    def __str__(self) -> str:
        step = f"after step {self.step}" if self.step else "before its first step ended"
        held = f"newest checkpoint: step {self.checkpoint}" if self.checkpoint is not None else "no checkpoint yet"
        return f"{step}; {held}"


def run_exit_code(before: RunProgress, after: RunProgress | None, command_code: int, total_steps: int | None) -> int:
    """Returns the exit code of a run whose command ended with `command_code`.

    The event that ended its last session decides. Without a new session, or without such an event, the command's code
    counts, but a 0 without further evidence is a failure. `total_steps` tells whether anything was left to train; None
    if the config is not known.
    """
    if after is None:
        return command_code or FAILED_CODE
    is_new = after.has_new_session(before)
    if is_new and after.last_event == "hung" and command_code > 128:
        return command_code  # a signal ended one rank, and the others hung waiting for it
    if is_new and after.last_event is not None:
        return EXIT_CODES[after.last_event]
    if command_code or is_new:
        return command_code or FAILED_CODE
    if total_steps is not None:
        is_done = after.checkpoint is not None and after.checkpoint >= total_steps
    else:
        is_done = after.sessions is None or after.last_event == "ended"
    return 0 if is_done else FAILED_CODE
