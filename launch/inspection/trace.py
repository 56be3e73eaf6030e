"""The file that `megalite trace` writes: steps of all ranks as a Chrome trace. No torch."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import LaunchError
from launch.inspection.run_files import EVENTS_BYTES, Facts, time_of
from launch.inspection.timelines import read_kept_step
from launch.output import check_writable, write_file
from megalite.config.loading.secrets_in_text import without_secrets
from megalite.monitor.events import EVENTS, read_events
from megalite.monitor.steps.alignment import on_last_clock
from megalite.monitor.steps.chrome_trace import ChromeTrace, chrome_trace

SUFFIX = ".json.gz"
HEAD = b'{"otherData": {"made_by": "megalite trace"'  # by which a file of ours is known


@dataclass(frozen=True)
class WrittenTrace:
    """A trace that has been written."""

    path: Path
    size: int  # bytes
    steps: tuple[int, ...]
    ranks: int
    trace_events: int
    arrows: int
    problems: tuple[str, ...]  # sentences: what it lacks


def trace_path(run_dir: Path, steps: Sequence[int]) -> Path:
    """Returns where the trace of some steps is written if nothing else is said."""
    numbers = f"step_{steps[0]:08d}" if len(steps) == 1 else f"steps_{steps[0]:08d}-{steps[-1]:08d}"
    return run_dir / f"trace_{numbers}{SUFFIX}"


def check_trace_path(path: Path) -> None:
    """Raises LaunchError where a trace cannot be written, or where there is something else."""
    check_writable(path)
    if not path.name.endswith(SUFFIX):
        raise LaunchError(f"{path}: a trace is compressed JSON; name a file that ends in {SUFFIX}")
    if os.path.lexists(path) and not _is_ours(path):
        raise LaunchError(f"{path} is there already and is no trace that megalite has written: give another -o")


def _is_ours(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    try:
        with gzip.open(path) as file:
            return file.read(len(HEAD)) == HEAD
    except (OSError, EOFError):
        return False


def write_trace(run_dir: Path, steps: Sequence[int], path: Path) -> WrittenTrace:
    """Writes the trace of kept steps. Raises LaunchError where none of a step can be read, or `path` not be written."""
    kept = [read_kept_step(run_dir, step) for step in steps]
    on_one_clock = on_last_clock([each.aligned for each in kept])
    day_s = kept[-1].aligned.day_s
    problems = [sentence for each in kept for sentence in each.problems]
    began = min(timeline.began for step in on_one_clock for timeline in step.values())
    ended = max(timeline.ended for step in on_one_clock for timeline in step.values())
    trace = chrome_trace(on_one_clock, _events(run_dir, began, ended, day_s, problems))
    if trace.left_out:
        problems.append(
            f"{trace.left_out} of {trace.left_out + trace.arrows} arrows are left out, because they would lead "
            f"backwards, by up to {trace.most_s * 1000:.3g} ms: clocks of machines are compared no better"
        )
    ranks = {rank for step in on_one_clock for rank in step}
    facts = {"made_by": "megalite trace", "run_dir": str(run_dir), "steps": list(steps), "problems": problems}
    data = _compressed(facts, trace)
    write_file(path, data)
    return WrittenTrace(path, len(data), tuple(steps), len(ranks), len(trace.events), trace.arrows, tuple(problems))


def _events(run_dir: Path, began: float, ended: float, day_s: float, problems: list[str]) -> list[Facts]:
    """Returns the events of the run during the trace, without secrets, on its clock."""
    try:
        found = read_events(run_dir / EVENTS, EVENTS_BYTES)
    except OSError as error:
        problems.append(f"{run_dir / EVENTS} cannot be read: {error.strerror or error}")
        return []
    timed = [without_secrets(event) | {"time": time_of(event) - day_s} for event in found]
    return [event for event in timed if began <= event["time"] <= ended]


def _compressed(facts: dict[str, Any], trace: ChromeTrace) -> bytes:
    """Returns the trace as compressed JSON, one event a line, which is never whole in memory as text."""
    buffer = io.BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as file:
        head = json.dumps({"otherData": facts, "displayTimeUnit": "ms", "traceEvents": []}, default=str)
        file.write(head.removesuffix("]}").encode())
        for number, event in enumerate(trace.events):
            file.write(b",\n" * (number > 0) + json.dumps(event, default=str).encode())
        file.write(b"]}\n")
    return buffer.getvalue()
