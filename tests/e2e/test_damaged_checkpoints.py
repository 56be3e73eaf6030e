"""The newest checkpoint is damaged: a run says so in one line, goes on from the one before, and writes it anew."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.errors import USER_ERROR_CODE
from megalite.checkpoint.manifest import MANIFEST
from tests.e2e.conftest import References
from tests.helpers.audit import audit_against, complete, steps_done
from tests.helpers.faults import die_at
from tests.helpers.warm_runs import session, train

pytestmark = pytest.mark.slow

BATCH = 4
LAST = "step_00000008"
FILE = "rank_00001_000.safetensors"


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    """Two stages, and checkpoints of steps 2, 4, 6 and 8."""
    tiny["training"]["steps"] = 8
    parallel, checkpoint = {"pipeline_parallel_size": 2}, {"interval": 2, "keep_last": 0}
    return tiny | {"parallel": parallel, "checkpoint": checkpoint, "monitor": {"plot": False, "report": False}}


@pytest.fixture
def finished(config: dict[str, Any], references: References) -> Path:
    """The run's folder as it was left after the last step; a copy."""
    run_dir = Path(config["run_dir"])
    shutil.copytree(references.of(config).run_dir, run_dir)
    return run_dir


def truncate(folder: Path) -> None:
    os.truncate(folder / FILE, (folder / FILE).stat().st_size // 2)


def flip_a_bit(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def forget_a_sample(folder: Path) -> None:
    """A bit flips in a number of the run's state, and the manifest is still one."""
    path = folder / MANIFEST
    place = path.read_bytes().index(b'"consumed_samples": 32') + len(b'"consumed_samples": 3')
    flip_a_bit(path, place)
    assert json.loads(path.read_bytes())["state"]["consumed_samples"] == 33


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file is truncated": (truncate, f"{LAST}: not a complete checkpoint: {FILE} has "),
    "a bit is flipped": (lambda f: flip_a_bit(f / FILE, -1000), f"{LAST}: {FILE} has changed since it was written"),
    "a file is missing": (lambda f: (f / FILE).unlink(), f"{LAST}: not a complete checkpoint: {FILE} is missing"),
    "the manifest is cut": (lambda f: os.truncate(f / MANIFEST, 500), f"{LAST}/{MANIFEST}: not a manifest"),
    "the manifest is changed": (forget_a_sample, f"{LAST}/{MANIFEST}: has changed since it was written"),
    "the manifest is missing": (lambda f: (f / MANIFEST).unlink(), f"{LAST}: not a complete checkpoint: it has no "),
    "of another program": (lambda f: (f / MANIFEST).write_text("{}"), f"{LAST}/{MANIFEST}: not a manifest"),
    "gone, but for `latest`": (shutil.rmtree, ""),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_is_taken(
    damage: str, config: dict[str, Any], finished: Path, references: References, tmp_path: Path
) -> None:
    harm, reason = DAMAGES[damage]
    root = finished / "checkpoints"
    harm(root / LAST)
    said = [line.partition("] ")[2] or line for line in train(tmp_path / "session", config).splitlines()]
    passed_over = [line for line in said if "passed over" in line]
    if reason:
        assert len(passed_over) == 1 and passed_over[0].startswith(
            f"megalite: warning: passed over: {root}/{reason}"
        ), said
    else:
        assert not passed_over
    assert f", resumes from step 6 of 8 ({root}/step_00000006)" in "\n".join(said)
    audit_against(references.of(config).run_dir, finished, BATCH)


def test_all_that_are_damaged_are_named_and_the_last_good_one_is_taken(
    config: dict[str, Any], finished: Path, references: References, tmp_path: Path
) -> None:
    """Also where the save that replaces one of them is killed when the old one is gone and the new one not there."""
    root = finished / "checkpoints"
    for step in (4, 6, 8):
        flip_a_bit(root / f"step_{step:08d}" / FILE, -1000)
    with session(tmp_path / "session", config, fault=(die_at, ("damaged one put aside", 0, [0, 1], 1))) as running:
        assert running.wait() == [-signal.SIGKILL] * 2, running.output()
    assert not (root / "step_00000004").exists()
    said = [line.partition("] ")[2] or line for line in train(tmp_path / "session", config).splitlines()]
    assert [line for line in said if "passed over" in line] == [
        f"megalite: warning: passed over: {root}/step_{step:08d}: {FILE} has changed since it was written: "
        f"its digest differs; the run starts from {root}/step_00000002"
        for step in (8, 6, 4)
    ]
    assert f", resumes from step 2 of 8 ({root}/step_00000002)" in "\n".join(said)
    audit_against(references.of(config).run_dir, finished, BATCH)
    assert complete(root) == {2, 4, 6, 8}


def test_a_damaged_one_does_not_cost_a_good_one_its_place(
    config: dict[str, Any], references: References, tmp_path: Path
) -> None:
    """One checkpoint is kept beside that of step 4, and a damaged one is of a later step: it is not the newest."""
    config["checkpoint"] |= {"keep_last": 1, "keep_every": 4}
    root = Path(config["run_dir"]) / "checkpoints"
    train(tmp_path / "session", config)
    assert complete(root) == {4, 8}
    flip_a_bit(root / LAST / FILE, -1000)
    with session(tmp_path / "session", config, fault=(die_at, ("all files written", 0, [0, 1], 2))) as running:
        assert running.wait() == [-signal.SIGKILL] * 2, running.output()
    assert f", resumes from step 6 of 8 ({root}/step_00000006)" in train(tmp_path / "session", config)
    audit_against(references.of(config).run_dir, root.parent, BATCH)


def test_nothing_begins_anew_where_all_are_damaged(config: dict[str, Any], finished: Path, tmp_path: Path) -> None:
    """A user may still save something: the run stops with one sentence, and touches nothing."""
    root = finished / "checkpoints"
    for step in (2, 4, 6, 8):
        truncate(root / f"step_{step:08d}")
    sentence = refused(config, tmp_path)
    assert sentence.startswith(f"megalite: error: {root} holds no checkpoint that can be used"), sentence
    assert f"{root}/{LAST}: not a complete checkpoint: {FILE} has " in sentence
    assert len(list(root.glob("step_*"))) == 4 and steps_done(finished) == 8


def refused(config: dict[str, Any], folder: Path) -> str:
    """The sentence with which a session ends before it trains."""
    with session(folder / "session", config) as running:
        running.one_has_ended()
        assert running.ranks[0].exitcode == USER_ERROR_CODE, running.output()
        # what made this process a rank is told before
        *_, sentence = running.output(0).splitlines()
        assert running.output(0).count("megalite: error: ") == 1, running.output(0)
    return sentence


def test_a_foreign_one_is_refused_until_it_is_removed(
    config: dict[str, Any], finished: Path, references: References, tmp_path: Path
) -> None:
    """It is whole, so either it or the config is a mistake, and only the user knows which."""
    other = config | {"run_dir": str(tmp_path / "other"), "model": config["model"] | {"num_hidden_layers": 2}}
    train(tmp_path / "session", other)
    root = finished / "checkpoints"
    shutil.rmtree(root / LAST)
    shutil.copytree(tmp_path / "other" / "checkpoints" / LAST, root / LAST)
    sentence = refused(config, tmp_path)
    assert sentence.startswith(f"megalite: error: {root}/{LAST} is of another model"), sentence
    shutil.rmtree(root / LAST)
    train(tmp_path / "session", config)
    audit_against(references.of(config).run_dir, finished, BATCH)
