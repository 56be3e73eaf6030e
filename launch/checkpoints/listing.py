"""Lists the checkpoints of a place: a run folder, a folder of checkpoints or one checkpoint, by path or fsspec URL.

No torch here.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.path_suggestions import did_you_mean
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.foreign_folders import foreign_checkpoint
from megalite.checkpoint.manifest import LATEST, STEP, Manifest
from megalite.checkpoint.remote.storage import Listed, Store, list_checkpoints
from megalite.checkpoint.safe_files import read_small_file
from megalite.config.path_or_url import url_of

CHECKPOINTS = "checkpoints"  # subfolder of a run folder
LEFT_OVER = re.compile(r"\.step_[0-9]+\.[a-z]+")  # folders of interrupted saves and deletions


@dataclass(frozen=True)
class Listing:
    """The checkpoints of a place."""

    root: str  # the folder of the checkpoints
    checkpoints: tuple[Listed, ...]  # by step
    latest: str | None  # name of the checkpoint that the pointer `latest` names
    left_overs: tuple[str, ...]  # names of folders of interrupted saves


def list_place(place: str) -> Listing:
    """Lists a place. Raises CheckpointError where it has no checkpoints or cannot be read."""
    if not is_url(place) and Path(place).name in ("", ".."):  # such as `.`, whose name is shown
        place = str(Path(place).resolve())
    checkpoints, root = list_checkpoints(place), place
    if checkpoints:
        root = checkpoints[0].url.rpartition("/")[0] or "."
    elif not is_url(place) and (Path(place) / CHECKPOINTS).is_dir():
        root = str(Path(place) / CHECKPOINTS)
    latest, left_overs = _pointer_and_left_overs(root)
    if not checkpoints and not left_overs:
        raise _nothing_in(place)
    return Listing(root, tuple(checkpoints), latest, tuple(left_overs))


def newest_complete(place: str) -> tuple[str, Manifest, list[str]]:
    """Finds the checkpoint that `place` is, or the newest complete one in it.

    Returns its URL, its manifest, and the reasons why newer ones were passed over. Raises CheckpointError where no
    checkpoint is complete.
    """
    passed_over: list[str] = []
    for listed in reversed(checkpoints_in(place)):
        if listed.manifest is not None:
            return listed.url, listed.manifest, passed_over
        passed_over.append(str(listed.problem))
    raise CheckpointError(passed_over[0])


def checkpoints_in(place: str) -> list[Listed]:
    """Lists all checkpoint folders of a place, complete or not. Raises CheckpointError where there are none."""
    checkpoints = list_checkpoints(place)
    if not checkpoints:
        raise _nothing_in(place)
    return checkpoints


def local_path(place: str, remedy: str = "copy the checkpoint here first") -> Path:
    """Returns `place` as a path. Raises CheckpointError with the `remedy` for a URL."""
    if is_url(place):
        raise CheckpointError(f"{place}: is no folder of this machine: {remedy}")
    return Path(place)


def is_url(place: str) -> bool:
    """Returns whether a place is an fsspec URL, not a path."""
    return "://" in place


def _nothing_in(place: str) -> CheckpointError:
    if is_url(place):
        return CheckpointError(f"{place}: there are no checkpoints: give the URL of a run, or of one checkpoint")
    path = Path(place)
    if url := url_of(path):
        return CheckpointError(f"{place}: there is no such folder, and a URL has two slashes: {url}")
    if not path.is_dir():
        return CheckpointError(
            f"{place}: {'is a file, no folder' if path.exists() else f'there is no such folder{did_you_mean(path)}'}"
        )
    if foreign := foreign_checkpoint(path):
        return CheckpointError(f"{place}: holds {foreign[0]}, which is not read here: {foreign[1]}")
    if STEP.fullmatch(path.name):
        return CheckpointError(f"{place}: not a complete checkpoint: it has no manifest.json, the save was interrupted")
    return CheckpointError(f"{place}: holds no checkpoints: give a run_dir, its checkpoints folder, or one checkpoint")


def _pointer_and_left_overs(root: str) -> tuple[str | None, list[str]]:
    """Returns the name in the pointer `latest`, if there is one, and the folders of interrupted saves."""
    if is_url(root):
        store = Store(root)
        files, folders = store.entries()
        pointer = store.read(LATEST) if files.get(LATEST, 1000) < 100 else None
    else:
        path = Path(root)
        pointer = None
        with suppress(OSError):
            pointer = read_small_file(path / LATEST, 100)
        folders = [folder.name for folder in path.iterdir()] if path.is_dir() else []
    latest = pointer.decode(errors="replace").strip() if pointer else None
    return latest, sorted(name for name in folders if LEFT_OVER.fullmatch(name))
