"""The tokenizer of a checkpoint is found where the run's folder is, and no other is ever taken for it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.tokenizers.reading import inspect_tokenizer
from data_pipeline.tokenizers.training import train_tokenizer
from launch.conversion.huggingface.checkpoint_tokenizer import FILES_SHA256, RECORDED, files_sha256, find_tokenizer
from launch.errors import LaunchError
from megalite.checkpoint.huggingface.tokenizer_folder import tokenizer_files
from megalite.checkpoint.manifest import Manifest

STEP = Path("checkpoints") / "step_00000003"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """The tokenizer that data was prepared with."""
    return train_tokenizer(["abc " * 9], tmp_path / "tok", 258)


@pytest.fixture
def run_dir(tokenizer: Path, tmp_path: Path) -> Path:
    """A run's folder with a copy of it."""
    (tmp_path / "run" / STEP).mkdir(parents=True)
    shutil.copytree(tokenizer, tmp_path / "run" / "model_tokenizer")
    return tmp_path / "run"


def manifest(tokenizer: Path, recorded: str | None = RECORDED, **others: Any) -> Manifest:
    digest = inspect_tokenizer(tokenizer).sha256
    known = {"tokenizer": recorded, "tokenizer_sha256": digest} | others
    return Manifest.model_validate({"step": 3, "config": {}, "state": {}, "tensors": {}, "files": {}} | known)


def test_it_moves_with_the_runs_folder(tokenizer: Path, run_dir: Path, tmp_path: Path) -> None:
    ours = manifest(tokenizer)
    shutil.rmtree(tokenizer)
    for new_place in (tmp_path / "elsewhere", tmp_path / "elsewhere again"):
        run_dir = run_dir.rename(new_place)
        assert find_tokenizer(ours, run_dir / STEP).folder == run_dir / "model_tokenizer"


def test_checkpoints_on_another_disk_are_the_runs_all_the_same(tokenizer: Path, run_dir: Path, tmp_path: Path) -> None:
    (run_dir / "checkpoints").rename(tmp_path / "scratch")
    (run_dir / "checkpoints").symlink_to(tmp_path / "scratch")
    assert find_tokenizer(manifest(tokenizer), run_dir / STEP).folder == run_dir / "model_tokenizer"


def test_a_checkpoint_of_an_older_version_names_a_folder(tokenizer: Path, run_dir: Path) -> None:
    """It is taken while it is the right one; else the copy that a resume has kept since."""
    older = manifest(tokenizer, str(tokenizer))
    assert find_tokenizer(older, run_dir / STEP).folder == tokenizer
    train_tokenizer(["xyz " * 9], tokenizer, 258, overwrite=True)
    assert find_tokenizer(older, run_dir / STEP).folder == run_dir / "model_tokenizer"
    shutil.rmtree(run_dir / "model_tokenizer")
    found = find_tokenizer(older, run_dir / STEP)
    assert found.folder is None and found.is_doubtful and f"{older.tokenizer_sha256}: it was retrained" in found.problem


def test_a_folder_elsewhere_is_taken_only_by_its_digest(tokenizer: Path, run_dir: Path) -> None:
    """An export would copy what a manifest of somebody else names: any folder of this machine."""
    shutil.copy(tokenizer / "tokenizer.json", run_dir / "checkpoints")
    for recorded in (str(tokenizer), os.path.relpath(tokenizer, run_dir / STEP), "x/../../../../tok", ".."):
        found = find_tokenizer(manifest(tokenizer, recorded, tokenizer_sha256=None), run_dir / STEP)
        assert found.folder is None and found.is_doubtful and "has no digest to know it by" in found.problem
    kept = find_tokenizer(manifest(tokenizer, tokenizer_sha256=None), run_dir / STEP)
    assert kept.folder == run_dir / "model_tokenizer"
    assert find_tokenizer(manifest(tokenizer, ".", tokenizer_sha256=None), run_dir / STEP).folder is None
    shutil.copytree(tokenizer, run_dir / STEP / "own")
    assert find_tokenizer(manifest(tokenizer, "own", tokenizer_sha256=None), run_dir / STEP).folder is not None


def test_a_tokenizer_without_tokenizer_json_is_known_by_all_its_files(tokenizer: Path, tmp_path: Path) -> None:
    """One that an import has found, such as vocab.json and merges.txt, or tokenizer.model."""
    (tokenizer / "tokenizer.json").rename(tokenizer / "vocab.json")
    imported = {"hugging_face": {FILES_SHA256: files_sha256(tokenizer_files(tokenizer))}}
    ours = Manifest.model_validate(
        {"step": 0, "config": imported, "state": {}, "tensors": {}, "files": {}, "tokenizer": str(tokenizer)}
    )
    assert find_tokenizer(ours, tmp_path / "imported").folder == tokenizer
    (tokenizer / "vocab.json").rename(tokenizer / "merges.txt")
    found = find_tokenizer(ours, tmp_path / "imported")
    assert found.folder is None and found.is_doubtful and f"{tokenizer}: its files were changed since" in found.problem
    shutil.rmtree(tokenizer)
    found = find_tokenizer(ours, tmp_path / "imported")
    assert found.folder is None and not found.is_doubtful and f"is not in {tokenizer}" in found.problem
    assert find_tokenizer(ours, tmp_path / "imported", _with_files(tmp_path / "moved")).folder == tmp_path / "moved"


def _with_files(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"pieces")
    return folder


def test_what_cannot_be_found_is_said(tokenizer: Path, run_dir: Path, tmp_path: Path) -> None:
    alone = (run_dir / STEP).rename(tmp_path / "alone")
    found = find_tokenizer(manifest(tokenizer), alone)
    assert (
        found.folder is None and not found.is_doubtful and f"its tokenizer is not in {tmp_path.parent}" in found.problem
    )
    unknown = find_tokenizer(manifest(tokenizer, None, tokenizer_sha256=None), run_dir / STEP)
    assert unknown.folder is None and unknown.problem == "the checkpoint knows no tokenizer"


def test_a_given_one_must_be_the_right_one(tokenizer: Path, tmp_path: Path) -> None:
    alone, ours = tmp_path / "alone", manifest(tokenizer)
    for given in (tokenizer, tokenizer / "tokenizer.json", str(tokenizer)):
        assert find_tokenizer(ours, alone, given).folder == tokenizer
    other = train_tokenizer(["xyz " * 9], tmp_path / "other", 258)
    wrong = {
        other: f"another tokenizer than that of {alone}: .* and {ours.tokenizer_sha256} is wanted",
        tmp_path / "nowhere": "there is no tokenizer.json",
        tmp_path: "there is no tokenizer.json",
        tokenizer / "tokenizer_config.json": "there is no tokenizer.json",
    }
    for given, says in wrong.items():
        with pytest.raises(LaunchError, match=f"^--tokenizer {given}.*{says}") as caught:
            find_tokenizer(ours, alone, given)
        assert "\n" not in str(caught.value)
    assert find_tokenizer(manifest(tokenizer, None, tokenizer_sha256=None), alone, other).folder == other
