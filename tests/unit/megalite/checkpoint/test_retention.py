"""The newest always stays, what a policy promises stays, and a kill in a deletion leaves a checkpoint whole or gone."""

from __future__ import annotations

import fcntl
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import MANIFEST, Manifest, find_latest, read_manifest, step_folders
from megalite.checkpoint.remote.storage import list_checkpoints
from megalite.checkpoint.retention import Retention, RetentionCandidate, clean_up, prune, which_to_delete
from tests.unit.megalite.checkpoint.test_commit import write

LOSSES = st.none() | st.floats(0, 10) | st.sampled_from([1.0, float("nan"), float("inf")])
CANDIDATES = st.dictionaries(st.integers(0, 200), LOSSES, max_size=30).map(
    lambda losses: [RetentionCandidate(f"step_{step:08d}", step, loss) for step, loss in losses.items()]
)
POLICIES = st.builds(Retention, st.integers(0, 12), st.integers(0, 12), st.integers(0, 6))


def loss_of(one: RetentionCandidate) -> float:
    loss = one.evaluation_loss
    return loss if loss is not None and loss < float("inf") else float("inf")


@given(CANDIDATES, POLICIES, st.data())
def test_what_a_policy_promises_stays_and_nothing_else(
    candidates: list[RetentionCandidate], policy: Retention, data: st.DataObject
) -> None:
    protect = data.draw(st.sets(st.sampled_from(sorted(one.name for one in candidates)))) if candidates else set()
    deleted = which_to_delete(data.draw(st.permutations(candidates)), policy, protect)
    kept = [one for one in candidates if one not in deleted]
    assert len(kept) + len(deleted) == len(candidates)
    assert not candidates or max(candidates, key=lambda one: one.step) in kept, "the newest stays"
    assert not any(one.name in protect for one in deleted)
    if policy.keep_last == 0:
        assert not deleted
        return
    for one in candidates:
        newer = sum(other.step > one.step for other in candidates)
        better = sum(loss_of(other) < loss_of(one) for other in candidates)
        is_every = policy.keep_every > 0 and one.step % policy.keep_every == 0
        is_best = loss_of(one) < float("inf") and better < policy.keep_best
        has_reason = newer < policy.keep_last or is_every or one.name in protect
        assert one in kept or not (has_reason or (is_best and better + ties(one, candidates) <= policy.keep_best))
        assert one in deleted or has_reason or is_best
    assert which_to_delete(kept, policy, protect) == [], "a second time there is nothing to do"
    assert [one.step for one in deleted] == sorted(one.step for one in deleted), "the oldest goes first"


def ties(one: RetentionCandidate, candidates: list[RetentionCandidate]) -> int:
    return sum(loss_of(other) == loss_of(one) for other in candidates)


def test_of_equal_losses_the_newer_is_better() -> None:
    candidates = [RetentionCandidate(f"step_{step:08d}", step, 1.0) for step in (1, 2, 3)]
    assert [one.step for one in which_to_delete(candidates, Retention(1, 0, 2))] == [1]


def with_loss(folder: Path, loss: float) -> None:
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_bytes(manifest.model_copy(update={"evaluation_loss": loss}).sealed())


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), 0.5, None])
def test_a_loss_that_is_not_finite_is_one_all_the_same(loss: float | None, tmp_path: Path) -> None:
    """As `null` it would be no evaluation, and each resume would evaluate again."""
    sealed = read_manifest(write(tmp_path, 1)).model_copy(update={"evaluation_loss": loss}).sealed()
    assert repr(Manifest.model_validate_json(sealed).evaluation_loss) == repr(loss)


def test_folders_go_and_incomplete_ones_are_neither_counted_nor_touched(tmp_path: Path) -> None:
    folders = [write(tmp_path, step) for step in range(1, 8)]
    with_loss(folders[1], 0.5)
    with_loss(folders[3], 0.7)
    (folders[6] / MANIFEST).unlink()
    (tmp_path / "step_00000003_by_hand").mkdir()
    deleted = prune(tmp_path, Retention(2, 3, 1), protect=[folders[0]])
    assert deleted == [folders[3]]
    deleted = prune(tmp_path, Retention(2, 3, 1))
    assert deleted == [folders[0]]
    # the newest 2 complete ones, step 3, the best; the one without a manifest as it was
    assert [folder.name[-1] for folder in step_folders(tmp_path)] == list("23567")
    assert sorted(path.name for path in tmp_path.glob(".*")) == []
    assert (tmp_path / "step_00000003_by_hand").is_dir() and len(list(folders[6].iterdir())) == 1


def test_the_only_complete_one_stays_whatever_lies_beside_it(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for step in (2, 3):
        (write(tmp_path, step) / MANIFEST).unlink()
    assert prune(tmp_path, Retention(1)) == []
    assert find_latest(tmp_path)[0] == tmp_path / "step_00000001"


def test_what_cannot_be_deleted_is_told_in_one_sentence(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / ".step_00000001.deleted").write_text("a file where a folder is expected")
    with pytest.raises(CheckpointError, match="step_00000001: cannot be deleted") as told:
        prune(tmp_path, Retention(1))
    assert "\n" not in str(told.value)
    assert clean_up(tmp_path) == [tmp_path / ".step_00000001.deleted"]
    assert prune(tmp_path, Retention(1)) == [tmp_path / "step_00000001"]


PRUNER = """
import os, shutil, signal, sys
from pathlib import Path
from megalite.checkpoint import retention
root, fatal = Path(sys.argv[1]), int(sys.argv[2])
calls = 0
def dying(function):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call
# every change of the disk that a deletion makes
Path.rename, os.unlink, os.rmdir = dying(Path.rename), dying(os.unlink), dying(os.rmdir)
retention.prune(root, retention.Retention(1))
"""


@pytest.mark.slow
def test_killed_at_every_moment_of_a_deletion_a_checkpoint_is_whole_or_gone(tmp_path: Path) -> None:
    """The kill is a real SIGKILL before each rename and removal in turn, until one run gets through."""
    write(tmp_path / "original", 1)
    write(tmp_path / "original", 2)
    for fatal in range(1, 20):
        root = tmp_path / str(fatal)
        shutil.copytree(tmp_path / "original", root)
        done = subprocess.run([sys.executable, "-c", PRUNER, str(root), str(fatal)], capture_output=True, check=False)
        assert all(read_manifest(folder) for folder in step_folders(root)), "half-deleted, yet under its name"
        if done.returncode == 0:
            assert fatal >= 5, "the kills did not reach a deletion's moments"
            return
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        clean_up(root)
        assert not list(root.glob(".*"))
        prune(root, Retention(1))
        assert [one.step for one in list_checkpoints(root)] == [2]
    raise AssertionError("no run got through")


def test_a_start_moves_latest_and_removes_half_written_files(tmp_path: Path) -> None:
    """A kill in the last save's `latest` left both for good: a run that is complete writes it no more."""
    write(tmp_path, 1)
    write(tmp_path, 2)
    for name in (".latest.tmp", ".latest.0123456789abcdef.tmp"):
        (tmp_path / name).write_text("step_0000")
    (tmp_path / "latest").write_text("step_00000001")
    with (tmp_path / ".written_now.tmp").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert clean_up(tmp_path) == []
    assert (tmp_path / "latest").read_text() == "step_00000002"
    assert [path.name for path in tmp_path.glob(".*")] == [".written_now.tmp"]


def test_a_kill_between_the_two_names_of_a_replaced_checkpoint_loses_none(tmp_path: Path) -> None:
    """The old one is out of the way, the new one is not in place yet: the next run finds the old one."""
    for name in (".step_00000003.replaced", ".step_00000003.tmp", ".step_00000006.replaced", "step_00000006"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "which").write_text(name)
    clean_up(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000003", "step_00000006"]
    assert (tmp_path / "step_00000003" / "which").read_text() == ".step_00000003.replaced"
    assert (tmp_path / "step_00000006" / "which").read_text() == "step_00000006"
