"""`events.jsonl`: the events of a run besides its steps, one JSON object per line, over all its sessions.

A session is one start of the run's processes. Only rank 0 writes. Lines are never removed, so the file records
restarts and lost work.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megalite.checkpoint.small_files import open_to_write
from megalite.config.hidden_secrets import without_secrets

LONGEST_LINE_BYTES = 1 << 20


def append_line(path: Path, line: str) -> None:
    """Appends one line. Raises OSError, UnsafeFile where the file is none that a run has made.

    The file is opened each time, so that a full disk damages no other line. If a kill has left half a line, the new one
    starts on a line of its own. The line is one append of the kernel's, so threads do not mix their lines.
    """
    data = line.encode()
    with os.fdopen(open_to_write(path, append=True), "ab+") as file:
        if file.seek(0, os.SEEK_END) > 0:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                data = b"\n" + data
        file.write(data)


def read_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Returns the objects in the order of writing, all or those in the last bytes; skips lines that a kill left
    half-written, and those of LONGEST_LINE_BYTES or more. Raises OSError."""
    if not path.is_file():  # nor a named pipe, which would be waited for
        return []
    objects = []
    with path.open("rb") as file:
        start = 0 if last_bytes is None else max(0, file.seek(0, 2) - last_bytes)
        file.seek(start)
        is_cut = start > 0
        while line := file.readline(LONGEST_LINE_BYTES):
            is_whole = not is_cut and len(line) < LONGEST_LINE_BYTES
            is_cut = not line.endswith(b"\n")
            with suppress(ValueError, RecursionError):
                if is_whole and isinstance(value := json.loads(line), dict):
                    objects.append(value)
    return objects


EVENTS = "events.jsonl"


class EventLog:
    """Appends events to one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: str, **facts: Any) -> None:
        """Appends `event` with the time (unix seconds) and `facts`, without secrets, as JSON. Raises OSError."""
        known = {"time": time.time(), "event": event, **without_secrets(facts)}
        append_line(self._path, json.dumps(known, default=str) + "\n")


def read_events(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Returns the events in the order of writing; `last_bytes` and what is skipped as in `read_lines`."""
    return [event for event in read_lines(path, last_bytes) if isinstance(event.get("event"), str)]
