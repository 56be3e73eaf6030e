"""`events.jsonl`: the events of a run besides its steps, one JSON object per line, over all its sessions.

A session is one start of the run's processes. Rank 0 writes, and of a hang the first rank that explains it: a line is
one append. Lines are never removed, so the file records restarts and lost work.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

from megalite.config.loading.secrets_in_text import without_secrets
from megalite.monitor.line_files import LineFile, stream_lines

EVENTS = "events.jsonl"
EventName = Literal[
    "started", "passed_over", "config_changed", "saved", "save_failed", "mirrored", "mirror_failed", "exported",
    "export_failed", "intervened", "rolled_back", "steps_lost", "slow_rank", "slow_rank_over", "hung", "lines_lost",
    "ended", "preempted", "interrupted", "stopped", "not saved",
]  # fmt: skip
"""Events, with their facts in docs/observing.md."""


class EventLog(LineFile):
    """Appends events to one file."""

    def write(self, event: EventName, **facts: Any) -> None:
        """Appends `event` with the time (unix seconds) and `facts`, without secrets, as JSON. Raises OSError."""
        known = {"time": time.time(), "event": event, **without_secrets(facts)}
        self.append(json.dumps(known, default=str) + "\n")


def read_events(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Returns the events in the order of writing; `last_bytes` and what is skipped as in `stream_lines`."""
    return [event for event in stream_lines(path, last_bytes) if isinstance(event.get("event"), str)]
