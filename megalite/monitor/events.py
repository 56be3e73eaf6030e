"""`events.jsonl`: the events of a run besides its steps, one JSON object per line, over all its sessions.

A session is one start of the run's processes. Only rank 0 writes. Lines are never removed, so the file records
restarts and lost work.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


def append_line(path: Path, line: str) -> None:
    """Appends one line. Raises OSError.

    The file is opened each time, so that a full disk damages no other line. If a kill has left half a line, the new one
    starts on a line of its own. The line is one append of the kernel's, so threads do not mix their lines.
    """
    data = line.encode()
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                data = b"\n" + data
        file.write(data)


def read_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Returns the objects in the order of writing, all or those in the last bytes; skips lines that a kill left
    half-written. Raises OSError."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        start = 0 if last_bytes is None else max(0, file.seek(0, 2) - last_bytes)
        file.seek(start)
        if start > 0:
            file.readline()  # it may be cut
        lines = file.read().splitlines()
    objects = []
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            objects.append(value)
    return objects


EVENTS = "events.jsonl"


class EventLog:
    """Appends events to one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: str, **facts: Any) -> None:
        """Appends `event` with the time (unix seconds) and `facts`, as JSON. Raises OSError."""
        append_line(self._path, json.dumps({"time": time.time(), "event": event, **facts}, default=str) + "\n")


def read_events(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Returns the events in the order of writing; `last_bytes` and what is skipped as in `read_lines`."""
    return [event for event in read_lines(path, last_bytes) if isinstance(event.get("event"), str)]
