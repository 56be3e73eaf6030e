"""The checkpoints of a place, a local path or any fsspec URL. No torch.

A place is a run folder, a folder of checkpoints, or one checkpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from launch.checkpoint_tools.facts import age_seconds, holds, layout_words
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import LATEST, STEP, Manifest
from megalite.checkpoint.storage import Listed, Store, list_checkpoints

CHECKPOINTS = "checkpoints"  # of a run folder
LEFT_OVER = re.compile(r"\.step_[0-9]+\.[a-z]+")  # of saves and deletions that were interrupted


@dataclass(frozen=True)
class Row:
    """One checkpoint folder, complete or not. The last four are known only where the manifest can be read."""

    name: str
    url: str
    is_latest: bool  # what the pointer `latest` names
    problem: str | None  # a sentence; None: complete
    step: int | None
    size: int  # bytes, as they lie there
    age_s: float | None
    layout: str | None
    evaluation_loss: float | None
    holds: str | None


@dataclass(frozen=True)
class Listing:
    """A place."""

    place: str  # as it was asked for
    root: str  # the folder that the checkpoints lie in
    checkpoints: tuple[Listed, ...]  # by step
    latest: str | None  # name of the one that the pointer `latest` names
    left_overs: tuple[str, ...]  # names of folders that interrupted saves left

    def rows(self, now: datetime) -> tuple[Row, ...]:
        """The checkpoints as a table shows them. `now` has an offset."""
        return tuple(_row(one, one.name == self.latest, now) for one in self.checkpoints)


def list_place(place: str) -> Listing:
    """Raises CheckpointError where there is nothing to list, or the place cannot be asked."""
    if not is_url(place) and Path(place).name in ("", ".."):  # `.`: its name is shown
        place = str(Path(place).resolve())
    checkpoints = list_checkpoints(place)
    root = _root(place, checkpoints)
    latest, left_overs = _pointer_and_left_overs(root)
    if not checkpoints and not left_overs:
        raise _nothing_in(place)
    return Listing(place, root, tuple(checkpoints), latest, tuple(left_overs))


def newest_complete(place: str) -> tuple[str, Manifest, list[str]]:
    """The checkpoint that `place` is, or the newest complete one in it: its url, its manifest, and why newer ones were
    passed over. Raises CheckpointError where there is none."""
    passed_over: list[str] = []
    for listed in reversed(list_checkpoints(place)):
        if listed.manifest is not None and listed.problem is None:
            return listed.url, listed.manifest, passed_over
        passed_over.append(str(listed.problem))
    raise CheckpointError(passed_over[0]) if passed_over else _nothing_in(place)


def local_folders(place: str) -> list[Path]:
    """All checkpoint folders of a place on this machine, complete or not. Raises CheckpointError for no folder."""
    checkpoints = list_checkpoints(local_path(place))
    if not checkpoints:
        raise _nothing_in(place)
    return [Path(listed.url) for listed in checkpoints]


def local_path(place: str) -> Path:
    """Raises CheckpointError for a URL."""
    if is_url(place):
        raise CheckpointError(f"{place}: is no folder of this machine: copy the checkpoint here first")
    return Path(place)


def is_url(place: str) -> bool:
    """Whether a place is an fsspec URL and no path."""
    return "://" in place


def _nothing_in(place: str) -> CheckpointError:
    if is_url(place):
        return CheckpointError(f"{place}: there are no checkpoints: give the URL of a run, or of one checkpoint")
    path = Path(place)
    if not path.is_dir():
        return CheckpointError(f"{place}: {'is a file, no folder' if path.exists() else 'there is no such folder'}")
    if STEP.fullmatch(path.name):
        return CheckpointError(f"{place}: not a complete checkpoint: it has no manifest.json, the save was interrupted")
    return CheckpointError(f"{place}: holds no checkpoints: give a run_dir, its checkpoints folder, or one checkpoint")


def _root(place: str, checkpoints: list[Listed]) -> str:
    """The folder that checkpoints lie in."""
    if checkpoints:
        parent, _, _ = checkpoints[0].url.rpartition("/")
        return parent or "."
    inner = f"{place.rstrip('/')}/{CHECKPOINTS}"
    return inner if not is_url(place) and Path(inner).is_dir() else place


def _pointer_and_left_overs(root: str) -> tuple[str | None, list[str]]:
    """What `latest` names, if anything, and folders that interrupted saves left."""
    if is_url(root):
        store = Store(root)
        files, folders = store.entries()
        pointer = store.read(LATEST) if files.get(LATEST, 1000) < 100 else None
    else:
        path = Path(root)
        pointer = _read_pointer(path / LATEST)
        folders = [folder.name for folder in path.iterdir()] if path.is_dir() else []
    latest = pointer.decode(errors="replace").strip() if pointer else None
    return latest, sorted(name for name in folders if LEFT_OVER.fullmatch(name))


def _read_pointer(path: Path) -> bytes | None:
    try:
        with path.open("rb") as file:
            return file.read(100)
    except OSError:
        return None


def _row(listed: Listed, is_latest: bool, now: datetime) -> Row:
    manifest = listed.manifest
    return Row(
        name=listed.name,
        url=listed.url,
        is_latest=is_latest,
        problem=listed.problem,
        step=listed.step,
        size=listed.bytes,
        age_s=age_seconds(manifest, now) if manifest else None,
        layout=layout_words(manifest) if manifest else None,
        evaluation_loss=manifest.evaluation_loss if manifest else None,
        holds=holds(manifest) if manifest else None,
    )
