"""Chooses a checkpoint on all ranks at once: rank 0 names candidates, each rank checks its share of the files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from megalite.checkpoint.durable_files import verify_digest
from megalite.checkpoint.errors import CheckpointError, StorageError
from megalite.checkpoint.manifest import read_manifest, step_folders, step_of

Value = TypeVar("Value")
WAITS_S = (1.0, 3.0, 0.0)  # after a read that failed
UNREADABLE = "the storage fails: "
VISIBLE_WITHIN_S = 20.0  # a network file system may show a new folder a little later on other hosts


def newest_intact(
    root: Path, at_most_step: int | None = None, progress: Callable[[], None] = lambda: None
) -> tuple[Path | None, list[str]]:
    """Returns the newest checkpoint folder in `root` with valid manifest, sizes and digests, and why newer ones fail.

    Collective. `progress` is called after each file. Raises CheckpointError on all ranks where one of them does not see
    what rank 0 sees.
    """
    names: list[list[str]] = [[folder.name for folder in reversed(step_folders(root))] if root.is_dir() else []]
    dist.broadcast_object_list(names, src=0)
    skipped: list[str] = []
    for name in names[0]:
        if at_most_step is not None and step_of(name) > at_most_step:
            continue
        folder = root / name
        if not all(_gather(_is_visible(folder))):
            raise CheckpointError(
                f"not all ranks see {folder}: run_dir must be on storage that all hosts share, or it is not there yet"
            )
        reasons = [reason for reason in _gather(_problem_with(folder, progress)) if reason is not None]
        if not reasons:
            return folder, skipped
        for reason in reasons:
            if reason.startswith(UNREADABLE):
                raise StorageError(reason)
        skipped.append(reasons[0])
    return None, skipped


def _gather(value: Value) -> list[Value]:
    values = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _is_visible(folder: Path) -> bool:
    deadline = time.monotonic() + (VISIBLE_WITHIN_S if dist.get_rank() else 0)
    while not folder.is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    return folder.is_dir()


def _problem_with(folder: Path, progress: Callable[[], None]) -> str | None:
    """Returns why this rank rejects a checkpoint, or None; each rank reads its share of the files.

    A failing storage does not make a checkpoint bad: it is asked again, and then the run has to wait.
    """
    for wait_s in WAITS_S:
        try:
            files = read_manifest(folder).files
            for name in sorted(files)[dist.get_rank() :: dist.get_world_size()]:
                verify_digest(folder / name, files[name])
                progress()
        except CheckpointError as error:
            return str(error)
        except OSError as error:
            unreadable = f"{error.filename or folder}: cannot be read: {error.strerror or error}"
            time.sleep(wait_s)
        else:
            return None
    return UNREADABLE + unreadable
