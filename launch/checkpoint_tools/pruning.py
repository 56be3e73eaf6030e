"""Deleting checkpoints by hand: what would go, what stays and why, and never under a run that is going on."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from launch.checkpoint_tools.listing import CHECKPOINTS, list_place, local_path
from launch.errors import LaunchError
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import MANIFEST
from megalite.checkpoint.retention import Candidate, Retention, clean_up, prune, which_to_delete
from megalite.checkpoint.storage import Listed

LOCK = ".lock"  # of a run folder: launch/run_folder.py


@dataclass(frozen=True)
class Fate:
    """What becomes of one checkpoint folder."""

    name: str
    step: int | None
    size: int  # bytes
    evaluation_loss: float | None
    goes: bool
    why: str


@dataclass(frozen=True)
class PrunePlan:
    """What a prune would do to the checkpoints in `root`."""

    root: Path
    fates: tuple[Fate, ...]  # by step
    left_overs: tuple[str, ...]  # of interrupted saves: they go too

    @property
    def going(self) -> tuple[str, ...]:
        """Names of the checkpoints that go."""
        return tuple(fate.name for fate in self.fates if fate.goes)

    @property
    def is_empty(self) -> bool:
        """Nothing is to be deleted."""
        return not self.going and not self.left_overs

    @property
    def freed(self) -> int:
        """Bytes of the checkpoints that go."""
        return sum(fate.size for fate in self.fates if fate.goes)


@contextmanager
def no_run_in(place: str) -> Iterator[None]:
    """Keeps runs from starting in the run folder that `place` is, or is in. Raises LaunchError where one goes on."""
    folder = _checkpoints(place)
    with ExitStack() as held:
        # `checkpoints` may be a link to other storage: the run folder is where the link is
        for path in {folder.absolute().parent / LOCK, folder.resolve().parent / LOCK}:
            if path.is_file():
                held.enter_context(_locked(path))
        yield


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                f"a run is using {path.parent}, and deletes by its own checkpoint.keep_last, keep_every and keep_best: "
                "wait until it has ended, or look with --dry-run"
            ) from None
        yield


def _checkpoints(place: str) -> Path:
    path = local_path(place)
    return path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path


def plan_prune(place: str, policy: Retention) -> PrunePlan:
    """Raises CheckpointError where `place` is no folder of checkpoints on this machine."""
    if (local_path(place) / MANIFEST).is_file():
        raise CheckpointError(f"{place}: is one checkpoint: give the folder that it lies in")
    listing = list_place(place)
    listed = listing.checkpoints
    complete = [
        Candidate.of(one.name, one.manifest) for one in listed if one.manifest is not None and one.problem is None
    ]
    going = {saved.name for saved in which_to_delete(complete, policy)}
    newest = {saved.name for saved in complete} - {
        s.name for s in which_to_delete(complete, Retention(policy.keep_last))
    }
    fates = (
        Fate(
            name=one.name,
            step=one.step,
            size=one.bytes,
            evaluation_loss=one.manifest.evaluation_loss if one.manifest else None,
            goes=one.name in going,
            why=_why(one, policy, is_newest=one.name in newest, goes=one.name in going),
        )
        for one in listed
    )
    return PrunePlan(Path(listing.root), tuple(fates), listing.left_overs)


def _why(one: Listed, policy: Retention, *, is_newest: bool, goes: bool) -> str:
    if one.problem is not None:
        return "stays: not complete, so not judged: look at it with megalite checkpoint verify"
    if goes:
        return "goes: nothing keeps it"
    if is_newest:
        return f"stays: among the newest {policy.keep_last}"
    if policy.keep_every and one.step is not None and one.step % policy.keep_every == 0:
        return f"stays: a multiple of {policy.keep_every} steps"
    return f"stays: among the best {policy.keep_best}"


def carry_out(plan: PrunePlan, policy: Retention) -> None:
    """Deletes what the plan says, the oldest first, and what interrupted saves left.

    Call it inside `no_run_in`. Raises CheckpointError where something cannot be deleted, or where the newest one that
    stays is damaged: then the older ones may be all there is.
    """
    from launch.checkpoint_tools.verification import verify_checkpoint  # with torch, which a look needs not

    if plan.going:
        newest = next(fate for fate in reversed(plan.fates) if fate.why.startswith("stays: among the newest"))
        verified = verify_checkpoint(plan.root / newest.name, deep=False)
        if not verified.passed:
            raise CheckpointError(f"nothing was deleted, for the newest checkpoint is damaged: {verified.problems[0]}")
        prune(plan.root, policy)
    clean_up(plan.root)
