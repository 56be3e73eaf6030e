"""Makes the runs of a series one after the other, each as `megalite train` in a process of its own. No torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from launch.errors import LaunchError
from launch.experiments.measurement import RunMeasurement
from launch.experiments.series import RunSeries, SeriesRun
from launch.runtime.processes import TICK_S, ProcessTree, StopSignals
from launch.runtime.started_modules import COMMAND_LINE, python_command
from launch.supervision.run_progress import RunProgress
from megalite.checkpoint.safe_files import read_end

LOG_BYTES = 1 << 16
ERROR = "megalite: error: "

Advance = Callable[[SeriesRun, int], None]
"""Called with a run and the steps it has done."""

Finished = Callable[[SeriesRun, RunMeasurement | str], None]
"""Called with a run and its measurement, or with the reason why it has none."""


@dataclass
class SeriesResults:
    """The measurements of a series so far."""

    measured: dict[int, dict[int, RunMeasurement]]  # by place of the point and round
    failures: dict[int, str] = field(default_factory=dict)  # why a point has no measurement
    stopped_by: int | None = None  # a signal


def run_series(series: RunSeries, advance: Advance, finished: Finished) -> SeriesResults:
    """Makes the runs that are missing, and measures all.

    A point that has failed is not run again in this call. A signal ends the run that it comes to, without a save.
    """
    results = SeriesResults({place: {} for place in range(len(series.points))})
    with StopSignals() as signals:
        for run in series.runs():
            if run.place in results.failures:
                continue
            found = _measured(series, run) if series.is_done(run) else None
            if found is None:
                series.clear(run)
                code = _make(series, run, signals, advance)
                if code is None:
                    results.stopped_by = signals.last
                    break
                found = _reason(run, code) if code else _measured(series, run)
                finished(run, found)
            if isinstance(found, str):
                results.failures[run.place] = found
            else:
                results.measured[run.place][run.round] = found
    return results


def _measured(series: RunSeries, run: SeriesRun) -> RunMeasurement | str:
    try:
        return RunMeasurement.read(run.run_dir, series.warm_up)
    except LaunchError as error:
        return str(error)


def _make(series: RunSeries, run: SeriesRun, signals: StopSignals, advance: Advance) -> int | None:
    """Makes one run; returns its exit code, or None if a signal came first."""
    command = shlex.join(python_command(COMMAND_LINE, "train", *series.arguments(run)))
    words = ["sh", "-c", f"exec {command} >{shlex.quote(str(run.log))} 2>&1"]
    code = None
    with ProcessTree(words, os.environ) as tree:
        while code is None and signals.last is None:
            code = tree.wait(TICK_S)
            state = RunProgress.read(run.run_dir)
            advance(run, state.step if state is not None else 0)
    return code


def _reason(run: SeriesRun, code: int) -> str:
    """Returns what a run that failed said about it: its first error, or the last line of a traceback."""
    lines: list[str] = []
    with suppress(OSError):
        lines = [line for line in read_end(run.log, LOG_BYTES).decode(errors="replace").splitlines() if line.strip()]
    errors = [line.partition(ERROR)[2] for line in lines if ERROR in line]
    said = next(iter([*errors, *lines[-1:]]), "it said nothing")
    return f"{said} (exit code {code}; its output is in {run.log})"
