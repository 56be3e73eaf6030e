"""Finds the runs below a folder and reads a summary of each. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from data_pipeline.neighbours import nearest
from launch.checkpoints.listing import CHECKPOINTS
from launch.errors import LaunchError
from launch.inspection.files import check_local_folder, is_run
from launch.inspection.state import RunState
from launch.inspection.status import RunStatus, read_status


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
        what = "is a file" if root.exists() else f"does not exist{nearest(root)}"
        raise LaunchError(f"{root} {what}: give a folder with runs in it, such as the one above a run_dir")
    found = []
    for folder in _run_folders(root, depth):
        name = str(folder.relative_to(root)) if folder != root else folder.resolve().name
        advance(name)
        try:
            status = read_status(folder)
        except Exception as error:  # whatever is in its files: the others are listed all the same
            status = RunStatus(folder, RunState.UNREADABLE, f"{type(error).__name__}: {error}")
        found.append(RunSummary(name, status, _size_of(folder / CHECKPOINTS)))
    return sorted(found, key=lambda run: (-(run.status.last_activity or 0.0), run.name))


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Yields the run folders; those of runs, hidden ones, and those that may not be read are not searched."""
    if is_run(folder):
        yield folder
        return
    if depth <= 0:
        return
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        # a link may lead to a folder above, and then in a circle; but a run may be a link to other storage
        is_followed = not entry.is_symlink() or is_run(Path(entry.path))
        if is_followed and entry.is_dir() and not entry.name.startswith("."):
            yield from _run_folders(Path(entry.path), depth - 1)


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
