"""Deletes checkpoints on request: plans what is deleted and what is kept and why, never while a run is active."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.checkpoints.listing import CHECKPOINTS, list_place, local_path
from launch.errors import LaunchError
from launch.runtime.run_lock import LOCK, lock_file
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import MANIFEST, find_latest
from megalite.checkpoint.retention import Retention, RetentionCandidate, clean_up, prune, reasons_to_keep
from megalite.checkpoint.safe_files import SAFELY

LOCAL_ONLY = "only checkpoints of this machine are pruned; delete there with the tools of that storage"


@dataclass(frozen=True)
class Fate:
    """The decision to keep or delete one checkpoint folder, and its reason."""

    name: str
    step: int | None
    size: int  # bytes
    evaluation_loss: float | None
    goes: bool
    why: str


@dataclass(frozen=True)
class PrunePlan:
    """The checkpoints in `root` that a prune deletes and keeps."""

    root: Path
    fates: tuple[Fate, ...]  # by step
    left_overs: tuple[str, ...]  # folders of interrupted saves, deleted as well

    @property
    def to_delete(self) -> list[Fate]:
        """The checkpoints to delete, oldest first."""
        return [fate for fate in self.fates if fate.goes]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to delete."""
        return not self.to_delete and not self.left_overs


@contextmanager
def keep_runs_out_of(place: str) -> Iterator[None]:
    """Keeps runs from starting in the run folder of `place`. Raises LaunchError where one is active."""
    path = local_path(place, LOCAL_ONLY)
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    with ExitStack() as held:
        # `checkpoints` may be a link to other storage: the run folder is where the link is
        for lock in {folder.absolute().parent / LOCK, folder.resolve().parent / LOCK}:
            if lock.is_file():
                try:
                    lock_file(held.enter_context(os.fdopen(os.open(lock, os.O_RDONLY | SAFELY))))
                except BlockingIOError:
                    raise LaunchError(
                        f"a run is using {lock.parent}, and deletes by its own checkpoint.keep_last, keep_every and "
                        "keep_best: wait until it has ended, or use --dry-run"
                    ) from None
        yield


def plan_prune(place: str, policy: Retention) -> PrunePlan:
    """Plans a prune. Raises CheckpointError where `place` is no local folder of checkpoints."""
    if (local_path(place, LOCAL_ONLY) / MANIFEST).is_file():
        raise CheckpointError(f"{place}: is one checkpoint: give the folder that contains it")
    listing = list_place(place)
    complete = [RetentionCandidate.of(one.name, one.manifest) for one in listing.checkpoints if one.manifest]
    reasons, fates = reasons_to_keep(complete, policy), []
    for one in listing.checkpoints:
        loss = one.manifest.evaluation_loss if one.manifest else None
        reason = reasons.get(one.name)
        if one.problem is not None:
            reason = "not complete, so no rule applies: check it with megalite checkpoint verify"
        why = f"stays: {reason}" if reason else "goes: nothing keeps it"
        fates.append(Fate(one.name, one.step, one.bytes, loss, reason is None, why))
    return PrunePlan(Path(listing.root), tuple(fates), listing.left_overs)


def carry_out(plan: PrunePlan, policy: Retention) -> None:
    """Deletes the checkpoints of a plan, the oldest first, and the folders of interrupted saves.

    Call it inside `keep_runs_out_of`. Raises CheckpointError where something cannot be deleted, or where the newest
    checkpoint that is kept is damaged, since an older one may then be needed.
    """
    from launch.checkpoints.verification import verify_checkpoint  # imports torch, which a dry run does not need

    if plan.to_delete:
        newest, _ = find_latest(plan.root)
        assert newest is not None, "the newest complete checkpoint is never deleted"
        problems = verify_checkpoint(newest, deep=False).problems
        if problems:
            raise CheckpointError(f"nothing was deleted, for the newest checkpoint is damaged: {problems[0]}")
        prune(plan.root, policy)
    clean_up(plan.root)
