"""A run's history that grows: each look reads what the run has written since the last one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from launch.inspection.files import METRICS, Facts, RunFiles
from launch.inspection.history import RunHistory, StepColumns
from launch.inspection.watching.tail import Added, Cursor
from megalite.monitor.sinks.steps import STEPS

MOST_BREAKDOWNS = 10_000  # the last lines of steps.jsonl


class LiveRun:
    """Reads a run that trains. For one thread at a time."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._metrics = self._steps = Cursor()
        self._columns = StepColumns()
        self._breakdowns: deque[Facts] = deque(maxlen=MOST_BREAKDOWNS)

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
            self._columns.add(list(_objects(added)))
            self._metrics = added.next
            if not added.has_more:
                break
        while True:
            added = Added.read(self.run_dir / STEPS, self._steps)
            if added.is_anew:
                self._breakdowns.clear()
            self._breakdowns.extend(line for line in _objects(added) if isinstance(line.get("stages"), list))
            self._steps = added.next
            if not added.has_more:
                break
        files = RunFiles.read(self.run_dir)
        return RunHistory(self.run_dir, files, self._columns.by_step(), list(self._breakdowns), files.problems)


def _objects(added: Added) -> Iterator[dict[str, Any]]:
    """Yields the objects of the lines; a kill may have left half a line, which is passed over."""
    for line in added.lines:
        try:
            found = from_json(line)
        except ValueError:
            continue
        if isinstance(found, dict) and "step" in found:
            yield found
