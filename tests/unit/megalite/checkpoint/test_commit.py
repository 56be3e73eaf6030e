"""A reader sees the old checkpoint or the new one, whenever the writer is killed; a bad one gets one sentence."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.runtime.logs import configure_logging
from megalite.checkpoint import durable_files, writer
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import find_latest, read_manifest
from megalite.checkpoint.reader import CheckpointReader, open_checkpoint
from tests.helpers import rank_pool  # noqa: F401 - its fork server has torch imported
from tests.helpers.audit import verify_digests
from tests.helpers.saving import forge
from tests.helpers.single_rank import write_single

WEIGHTS = {"a.weight": torch.arange(12.0).view(3, 4), "b.bias": torch.arange(5.0)}


def write(folder: Path, step: int) -> Path:
    target = folder / f"step_{step:08d}"
    write_single(target, WEIGHTS.items(), step=step, config={"model": {}}, tokenizer=None, state={})
    return target


def test_any_slice_comes_back(tmp_path: Path) -> None:
    reader = CheckpointReader(write(tmp_path, 1))
    assert torch.equal(reader.read("a.weight"), WEIGHTS["a.weight"])
    assert torch.equal(reader.read("a.weight", (slice(1, 3), slice(2, 3))), WEIGHTS["a.weight"][1:3, 2:3])
    verify_digests(reader.folder)


def write_until_killed(folder: Path, fatal: int) -> None:
    """A save whose process gets SIGKILL right before one of its durable moments: sync, rename or replace."""
    calls = itertools.count(1)

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if next(calls) == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    patches: list[tuple[Any, str]] = [(writer, "sync"), (durable_files, "sync"), (os, "fsync")]
    patches += [(Path, "rename"), (Path, "replace")]
    for owner, name in patches:
        setattr(owner, name, dying(getattr(owner, name)))
    write(folder, 2)


@pytest.mark.slow
def test_killed_at_every_durable_moment_the_old_checkpoint_stays_whole(tmp_path: Path) -> None:
    """The kill is a real SIGKILL before each sync, rename and replace in turn, until one run gets through."""
    survived = 0
    for fatal in range(1, 40):
        folder = tmp_path / str(fatal)
        write(folder, 1)
        process = multiprocessing.get_context("forkserver").Process(target=write_until_killed, args=(folder, fatal))
        process.start()
        process.join()
        latest, skipped = find_latest(folder)
        assert latest is not None and not skipped, "an interrupted save must leave only hidden folders"
        verify_digests(latest)
        if process.exitcode == 0:
            assert latest.name == "step_00000002" and not list(folder.glob(".*"))
            break
        assert process.exitcode == -signal.SIGKILL
        survived += 1
        write(folder, 2)  # the next save removes what the killed one left
        assert not list(folder.glob(".*")) and read_manifest(folder / "step_00000002").step == 2
    assert survived >= 6, "the kills did not reach the protocol's moments"


def truncate(folder: Path) -> None:
    with (folder / "single_000.safetensors").open("r+b") as file:
        file.truncate(50)


def same_size_garbage(folder: Path) -> None:
    path = folder / "single_000.safetensors"
    path.write_bytes(os.urandom(path.stat().st_size))


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "manifest.json"),
    "file missing": (lambda f: (f / "single_000.safetensors").unlink(), "single_000.safetensors is missing"),
    "file truncated": (truncate, "bytes, not"),
    "file overwritten": (same_size_garbage, "single_000.safetensors"),
    "manifest of another program": (lambda f: (f / "manifest.json").write_text("{}"), "not a manifest"),
    "manifest not JSON": (lambda f: (f / "manifest.json").write_text("\x00"), "not a manifest"),
    "path outside the folder": (lambda f: forge(f, "single_000", "../single_000"), "outside its folder"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_gets_one_sentence(damage: str, tmp_path: Path) -> None:
    harm, fragment = DAMAGES[damage]
    folder = write(tmp_path, 1)
    harm(folder)
    with pytest.raises(CheckpointError) as told:
        CheckpointReader(folder)
    assert fragment in str(told.value) and str(folder) in str(told.value) and "\n" not in str(told.value)


def test_a_flipped_bit_is_found_by_the_digest(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    path = folder / "single_000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="digest"):
        verify_digests(folder)


def test_the_newest_complete_one_is_taken_and_the_rest_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, 1)
    truncate(write(tmp_path, 2))
    latest, skipped = find_latest(tmp_path)
    assert latest == tmp_path / "step_00000001"
    assert len(skipped) == 1 and "step_00000002" in skipped[0]

    configure_logging()
    assert open_checkpoint(tmp_path).folder == latest
    assert capsys.readouterr().err == f"megalite: warning: {skipped[0]}: taking {latest} instead\n"


def test_a_missing_piece_is_named(tmp_path: Path) -> None:
    reader = open_checkpoint(write(tmp_path, 1))
    with pytest.raises(CheckpointError, match=r"no tensor c\.weight"):
        reader.read("c.weight")
    with pytest.raises(CheckpointError, match=r"exp_avg of a\.weight is not whole: 12"):
        reader.read("a.weight", kind="exp_avg")
