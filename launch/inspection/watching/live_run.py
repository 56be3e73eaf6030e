"""A run's history that grows: each look reads what the run has written since the last one."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from launch.inspection.history import STEPS_BYTES, RunHistory, StepColumns
from launch.inspection.run_files import Facts, RunFiles
from launch.inspection.watching.tail import Added, Cursor
from megalite.monitor.sinks.jsonl import METRICS
from megalite.monitor.sinks.steps import STEPS


class LiveRun:
    """Reads a run that trains. For one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._metrics = self._steps = Cursor()
        self._columns = StepColumns()
        self._breakdowns: deque[tuple[int, Facts]] = deque()  # with the size of the line
        self._breakdown_bytes = 0

    @property
    def offset(self) -> int:
        """Bytes of metrics.jsonl that have been read."""
        return self._metrics.offset

    def look(self) -> RunHistory:
        """Returns all that is on record now. Raises OSError where it cannot be read, also where the folder is gone."""
        if not self.run_dir.is_dir():
            raise FileNotFoundError(2, "its folder is gone", str(self.run_dir))
        while True:
            added = Added.read(self.run_dir / METRICS, self._metrics)
            if added.is_anew:
                self._columns = StepColumns()
            self._columns.add([found for line in added.lines if (found := _object(line))])
            self._metrics = added.next
            if not added.has_more:
                break
        while True:
            added = Added.read(self.run_dir / STEPS, self._steps)
            if added.is_anew:
                self._breakdowns.clear()
                self._breakdown_bytes = 0
            for line in added.lines:
                if isinstance((found := _object(line)).get("stages"), list):
                    self._breakdowns.append((len(line), found))
                    self._breakdown_bytes += len(line)
            while self._breakdown_bytes > STEPS_BYTES:
                self._breakdown_bytes -= self._breakdowns.popleft()[0]
            self._steps = added.next
            if not added.has_more:
                break
        files = RunFiles.read(self.run_dir)
        return RunHistory(
            self.run_dir, files, self._columns.by_step(), [line for _, line in self._breakdowns], files.problems
        )


def _object(line: str) -> dict[str, Any]:
    """Returns the object of a line with a step; a kill may have left half a line, which is as empty."""
    try:
        found = from_json(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and "step" in found else {}
