"""The command of a run and its rank, each with marks of its processor and wall time: for benchmarks/startup.py.

It is copied out of this tree to run the code of another. The command is `python -m traced_start train CONFIG`, which
starts its rank as `python -m traced_start CONFIG`; each appends its marks in JSON to the file in MEGALITE_START_MARKS.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an older tree has it elsewhere
    from megalite.monitor.records.step import StepRecord

MARKS = "MEGALITE_START_MARKS"
Mark = tuple[str, float, float]  # the part that ends, processor time of this process so far, and the time of day


class Marks:
    """Marks of one process. A part ends where the next one begins."""

    def __init__(self, process: str) -> None:
        import psutil

        self._process, self._part = process, "interpreter and imports"
        self._began, self._marks = psutil.Process().create_time(), list[Mark]()

    def begin(self, part: str) -> None:
        """Ends the part before, and begins another."""
        self._marks.append((self._part, time.process_time(), time.time()))
        self._part = part

    def end(self) -> None:
        """Ends the last part, and writes all marks."""
        self.begin("")
        found = {"process": self._process, "began": self._began, "marks": self._marks}
        with Path(os.environ[MARKS]).open("a") as file:
            file.write(json.dumps(found) + "\n")


def command() -> None:
    """Runs `megalite` with the words of this command line, up to the end of the run."""
    from launch.__main__ import main
    from launch.cli import app  # noqa: F401
    from launch.trainer import local_run

    marks, start_ranks = Marks("command"), local_run.start_local_ranks  # type: ignore[attr-defined]
    marks.begin("checks before ranks")

    def start_traced_rank(mesh: Any, environment: dict[str, str], arguments: Any) -> int:
        marks.end()
        return start_ranks(mesh, environment, arguments, "traced_start")

    local_run.start_local_ranks = start_traced_rank  # type: ignore[assignment, attr-defined]
    main()


def rank() -> None:
    """Runs one rank, with the parts of its start that it tells a user who waits for long."""
    import launch.train as entry
    from launch.runtime.rank_process import run_to_the_end
    from launch.runtime.startup_progress import StartupProgress

    marks = Marks("rank")

    class TracedProgress(StartupProgress):
        def begin(self, what: str) -> None:
            marks.begin(what)
            super().begin(what)

        def on_step(self, record: StepRecord) -> None:
            if record["step"] == 1:
                marks.end()
            super().on_step(record)

    entry.StartupProgress = TracedProgress  # type: ignore[attr-defined]
    run_to_the_end(entry.main)


if __name__ == "__main__":
    command() if sys.argv[1] == "train" else rank()
