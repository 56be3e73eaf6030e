"""`events.jsonl`: what happened to a run besides its steps, one object a line, over all its sessions.

A session is one start of the run's processes. Only rank 0 writes; nothing is ever dropped from this file, so it tells
of restarts and of work that was lost.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from megalite.monitor.json_lines import append_line, read_lines

EVENTS = "events.jsonl"


class EventLog:
    """Appends to one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, event: str, **facts: Any) -> None:
        """Appends `event` with the time (unix seconds) and `facts`, which JSON holds; OSError where it cannot."""
        append_line(self._path, json.dumps({"time": time.time(), "event": event, **facts}, default=str) + "\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events in the order of their writing. Lines that a kill left half-written are passed over."""
    return [event for event in read_lines(path) if isinstance(event.get("event"), str)]
