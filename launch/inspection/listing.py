"""Finds the runs below a folder and reads a summary of each. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.path_suggestions import did_you_mean
from launch.checkpoints.listing import CHECKPOINTS
from launch.errors import LaunchError
from launch.inspection.run_files import check_local_folder, is_run
from launch.inspection.state import RunState
from launch.inspection.status import RunStatus, read_status
from launch.runtime.logs import get_logger

log = get_logger(__name__)
MOST_RUNS = 10_000


@dataclass(frozen=True)
class RunSummary:
    """One run of a folder."""

    name: str  # of its folder, from the folder that was searched
    status: RunStatus
    checkpoint_bytes: int


def list_runs(root: Path, depth: int, advance: Callable[[str], None] = lambda name: None) -> list[RunSummary]:
    """Lists the runs in a folder and in its subfolders down to `depth`, the latest active first.

    A run of which nothing can be read is listed as unreadable. `advance` gets the name of each before it is read.
    Raises LaunchError where there is no such folder.
    """
    check_local_folder(root)
    if not root.is_dir():
        what = "is a file" if root.exists() else f"does not exist{did_you_mean(root)}"
        raise LaunchError(f"{root} {what}: give a folder with runs in it, such as the one above a run_dir")
    found = []
    for folder in _run_folders(root, depth):
        name = str(folder.relative_to(root)) if folder != root else folder.resolve().name
        advance(name)
        try:
            status = read_status(folder)
        except Exception as error:  # whatever is in its files: the others are listed all the same
            status = RunStatus(folder, RunState.UNREADABLE, f"{type(error).__name__}: {error}")
        found.append(RunSummary(name, replace(status, events=()), _size_of(folder / CHECKPOINTS)))
        if len(found) == MOST_RUNS:
            log.warning(f"{root} holds {MOST_RUNS:,} runs or more: only the first are listed; give a folder below it")
            break
    return sorted(found, key=lambda run: (-(run.status.last_activity or 0.0), run.name))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yields the run folders; those of runs, hidden ones, and those that may not be read are not searched."""
    if is_run(folder):
        yield folder
        return
    if depth <= 0:
        return
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 - of a million entries their names alone
    except OSError:
        return
    for name in names:
        path = folder / name
        # a link may lead to a folder above, and then in a circle; but a run may be a link to other storage
        if not name.startswith(".") and path.is_dir() and (not path.is_symlink() or is_run(path)):
            yield from _run_folders(path, depth - 1)


def _size_of(folder: Path) -> int:
    """Returns the bytes of all files below a folder, with those that a save is writing; 0 if there is none."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size  # noqa: PTH118 - ten times faster
            except OSError:
                continue  # deleted meanwhile
    return total


def row_of(run: RunSummary) -> dict[str, Any]:
    """Returns a run as `--json` and `--csv` print it."""
    status = asdict(run.status)
    names = ("step", "total_steps", "loss", "tokens_per_second", "left_s", "layout", "last_activity", "checkpoint")
    return {
        "run": run.name,
        "state": str(run.status.state),
        "is_healthy": run.status.state.is_healthy,
        **{name: status[name] for name in names},
        "checkpoint_bytes": run.checkpoint_bytes,
        "host": run.status.host,
        "reason": run.status.reason,
    }
