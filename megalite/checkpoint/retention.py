"""Retention: keeps the newest N checkpoints, every Mth step and the K of lowest evaluation loss, and deletes safely.

A checkpoint is renamed to a hidden name before its files go, so a kill in between leaves it whole or gone. The newest
complete one, and so the only one, always stays. Folders that are not complete are neither counted nor
deleted.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.durable_files import remove, remove_left_overs, sync, write_durably
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import LATEST, Manifest, find_latest, read_manifest, step_folders
from megalite.config.sections import CheckpointConfig

LEFT_OVER = ("tmp", "deleted", "replaced")


@dataclass(frozen=True)
class Retention:
    """Reasons to keep a checkpoint; one is enough."""

    keep_last: int  # 0 = all
    keep_every: int = 0  # in steps; 0 = none
    keep_best: int = 0

    @classmethod
    def of(cls, config: CheckpointConfig) -> Retention:
        """Returns the policy of a config."""
        return cls(config.keep_last, config.keep_every, config.keep_best)


@dataclass(frozen=True)
class RetentionCandidate:
    """The facts about a complete checkpoint that retention depends on."""

    name: str  # of its folder
    step: int
    evaluation_loss: float | None = None

    @classmethod
    def of(cls, name: str, manifest: Manifest) -> RetentionCandidate:
        """Reads the facts from a manifest."""
        return cls(name, manifest.step, manifest.evaluation_loss)


def reasons_to_keep(candidates: Iterable[RetentionCandidate], policy: Retention) -> dict[str, str]:
    """Returns the first reason that keeps each complete checkpoint, by name; those that may be deleted are missing."""
    newest_first = sorted(candidates, key=lambda one: (one.step, one.name), reverse=True)
    evaluated = [one for one in newest_first if one.evaluation_loss is not None and math.isfinite(one.evaluation_loss)]
    best_first = sorted(evaluated, key=lambda one: one.evaluation_loss or 0.0)  # of equal ones the newer first
    reasons = {one.name: f"among the best {policy.keep_best}" for one in best_first[: policy.keep_best]}
    for place, one in enumerate(newest_first):
        if policy.keep_last == 0 or place < policy.keep_last:
            reasons[one.name] = f"among the newest {policy.keep_last}"
        elif policy.keep_every and one.step % policy.keep_every == 0:
            reasons[one.name] = f"a multiple of {policy.keep_every} steps"
    return reasons


def which_to_delete(
    candidates: Collection[RetentionCandidate], policy: Retention, protect: Collection[str] = ()
) -> list[RetentionCandidate]:
    """Returns the complete checkpoints that no reason keeps, oldest first; never one named in `protect`."""
    kept = {*reasons_to_keep(candidates, policy), *protect}
    return sorted((one for one in candidates if one.name not in kept), key=lambda one: (one.step, one.name))


def prune(root: Path, policy: Retention, protect: Iterable[Path] = ()) -> list[Path]:
    """Deletes the checkpoints in the folder `root` that no reason keeps; returns them, oldest first.

    Raises CheckpointError for the first one that cannot be deleted.
    """
    candidates = []
    for folder in step_folders(root):
        try:
            candidates.append(RetentionCandidate.of(folder.name, read_manifest(folder)))
        except CheckpointError:
            continue
    protected = {path.name for path in protect if path.resolve().parent == root.resolve()}
    deleted = [root / one.name for one in which_to_delete(candidates, policy, protected)]
    for folder in deleted:
        _delete(folder)
    return deleted


def _delete(folder: Path) -> None:
    hidden = folder.with_name(f".{folder.name}.deleted")
    try:
        if hidden.is_symlink() or hidden.exists():  # of an earlier deletion that was interrupted
            remove(hidden)
        folder.rename(hidden)
        sync(folder.parent)
        _remove(hidden)
    except OSError as error:
        raise CheckpointError(
            f"{folder}: cannot be deleted, though checkpoint.keep_last and its like no longer keep it: "
            f"{error.strerror or error}: make the folder writable, or delete it by hand"
        ) from None


def _remove(path: Path) -> None:
    """Removes a folder, a file, or a link, whose target on other storage stays. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def clean_up(root: Path) -> list[Path]:
    """Removes leftovers of interrupted saves and deletions, which have hidden names in `root`; returns them.

    A checkpoint that a kill found between its two names, on its way to be replaced, gets its own back, and `latest` the
    name of the newest. Call it only at the start of a run: a save in progress has such names. Raises CheckpointError.
    """
    try:
        for path in root.glob(".step_*.replaced"):
            own = path.with_name(path.name.removeprefix(".").removesuffix(".replaced"))
            if not own.exists():
                path.rename(own)
        left_over = sorted(path for kind in LEFT_OVER for path in root.glob(f".step_*.{kind}"))
        for path in left_over:
            _remove(path)
        remove_left_overs(root)
        newest, latest = find_latest(root)[0], root / LATEST
        if newest not in (None, root) and (not latest.is_file() or latest.read_bytes() != newest.name.encode()):
            write_durably(latest, newest.name.encode())
    except OSError as error:
        raise CheckpointError(f"{root}: cannot be cleaned up: {error.strerror or error}: make it writable") from None
    return left_over
