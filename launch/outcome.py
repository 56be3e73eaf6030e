"""How an attempt of a run went, by what the run itself left in its folder.

Launchers are no witnesses: torchrun makes 1 of every exit code of its ranks, `deepspeed` exits with 0 when what it had
started was killed, and a shell script may say anything.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from launch.errors import FAILED_CODE, HUNG_CODE, INTERRUPTED_CODE, PREEMPTED_CODE, STOPPED_CODE
from megalite.checkpoint.manifest import find_latest, read_manifest
from megalite.monitor.events import EVENTS, read_events
from megalite.monitor.sinks.jsonl import read_records

VERDICTS = {  # the events that end a session, and the exit codes they stand for
    "ended": 0,
    "preempted": PREEMPTED_CODE,
    "stopped": STOPPED_CODE,
    "hung": HUNG_CODE,
    "interrupted": INTERRUPTED_CODE,
}


@dataclass(frozen=True)
class RunFolder:
    """What it holds at one moment."""

    checkpoint: int | None = None  # step of the newest complete one
    step: int = 0  # the last one logged; 0: none
    last_record: str = ""  # all of it: a step that is done again has another time
    sessions: int | None = None  # starts of its ranks so far; None: there is no events.jsonl
    resumed_step: int = 0  # where the last session began
    verdict: str | None = None  # how the last session ended; None: it has not said so

    @classmethod
    def read(cls, run_dir: Path) -> RunFolder | None:
        """None where it cannot be read, which says nothing about what it holds."""
        try:
            newest, _ = find_latest(run_dir)
            records = read_records(run_dir / "metrics.jsonl")
            sessions, resumed_step, verdict = None, 0, None
            if (run_dir / EVENTS).is_file():
                sessions = 0
                for event in read_events(run_dir / EVENTS):
                    if event["event"] == "started":
                        sessions, resumed_step, verdict = sessions + 1, int(event.get("step", 0)), None
                    elif event["event"] in VERDICTS:
                        verdict = event["event"]
            return cls(
                checkpoint=read_manifest(newest).step if newest else None,
                step=int(records[-1]["step"]) if records else 0,
                last_record=json.dumps(records[-1]) if records else "",
                sessions=sessions,
                resumed_step=resumed_step,
                verdict=verdict,
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def has_new_session(self, before: RunFolder) -> bool:
        """Whether ranks came as far as saying that they start."""
        return (self.sessions or 0) > (before.sessions or 0)

    def has_trained(self, before: RunFolder) -> bool:
        """Whether a step has ended since `before`."""
        if self.sessions is None:  # no run of ours, or one that could not write it
            return (self.last_record, self.checkpoint) != (before.last_record, before.checkpoint)
        # between `started` and the first record, the records of the session before are still there
        return self.has_new_session(before) and self.step > self.resumed_step and self.last_record != before.last_record

    def is_where(self, other: RunFolder | None) -> bool:
        """Whether both have come equally far."""
        return other is not None and (self.checkpoint, self.step) == (other.checkpoint, other.step)

    def __str__(self) -> str:
        step = f"after step {self.step}" if self.step else "before its first step ended"
        held = f"newest checkpoint: step {self.checkpoint}" if self.checkpoint is not None else "no checkpoint yet"
        return f"{step}; {held}"


def code_of_run(before: RunFolder, after: RunFolder | None, command_code: int, total_steps: int | None) -> int:
    """The exit code of a run whose command ended with `command_code`.

    What its last session said counts. Where none began, or none has said how it ended, the command's code does; but a
    0 that nobody vouches for is a failure. `total_steps`: of a run that may have nothing left to train; None where its
    config is not known.
    """
    if after is None:
        return command_code or FAILED_CODE
    is_new = after.has_new_session(before)
    if is_new and after.verdict == "hung" and command_code > 128:
        return command_code  # the signal that ended one rank, for which the others then waited
    if is_new and after.verdict is not None:
        return VERDICTS[after.verdict]
    if command_code or is_new:
        return command_code or FAILED_CODE
    if total_steps is not None:
        is_done = after.checkpoint is not None and after.checkpoint >= total_steps
    else:
        is_done = after.sessions is None or after.verdict == "ended"
    return 0 if is_done else FAILED_CODE
