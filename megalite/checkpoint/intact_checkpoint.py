"""Finds the newest intact checkpoint on all ranks at once: each compares the digests of its share of the files."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
from pydantic import Field

from megalite.checkpoint.durable_files import verify_digest
from megalite.checkpoint.errors import CheckpointError, StorageError
from megalite.checkpoint.manifest import STEP, read_manifest, step_folders, step_of
from megalite.distributed.agreement import from_all_ranks, from_rank_0

StepName = Annotated[str, Field(pattern=f"^{STEP.pattern}$")]  # of a folder in `root`, never of one elsewhere
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
    skipped: list[str] = []

    def names() -> list[str]:
        return [folder.name for folder in reversed(step_folders(root))] if root.is_dir() else []

    for name in from_rank_0(names, list[StepName], (CheckpointError,), StorageError):
        if at_most_step is not None and step_of(name) > at_most_step:
            continue
        folder = root / name
        if not all(from_all_ranks(_is_visible(folder), bool)):
            raise CheckpointError(
                f"not all ranks see {folder}: run_dir must be on storage that all hosts share, or it is not there yet"
            )
        if (problem := _problem_of_any_rank(folder, progress)) is None:
            return folder, skipped
        skipped.append(problem)
    return None, skipped


def check_intact(folder: Path, progress: Callable[[], None]) -> None:
    """Raises CheckpointError on all ranks if one of a checkpoint's files has another digest than was recorded."""
    if (problem := _problem_of_any_rank(folder, progress)) is not None:
        raise CheckpointError(problem)


def _problem_of_any_rank(folder: Path, progress: Callable[[], None]) -> str | None:
    reasons = [reason for reason in from_all_ranks(_problem_with(folder, progress), str | None) if reason is not None]
    for reason in reasons:
        if reason.startswith(UNREADABLE):
            raise StorageError(reason)
    return reasons[0] if reasons else None


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
