"""A pipeline schedule that no config names: the ranks' choice, and that the run is the one in which it is named."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.checkpoint.manifest import find_latest, read_manifest
from tests.helpers.commands import metrics
from tests.helpers.warm_runs import train

CHOSEN = re.compile(r"schedule: (\S+) [\d.]+% idle")


def _open(tiny: dict[str, Any], stages: int) -> None:
    """Makes `tiny` a pipeline for which another schedule than 1F1B is faster."""
    tiny["model"]["num_hidden_layers"] = 2 * stages
    tiny["parallel"] = {"pipeline_parallel_size": stages}
    tiny["training"] |= {"global_batch_size": 8, "micro_batch_size": 1}
    tiny |= {"checkpoint": {"interval": 2}, "schedule": {"name": "constant"}}


@pytest.mark.parametrize("stages", [2, 4])
def test_an_open_schedule_trains_as_the_same_one_named(stages: int, tiny: dict[str, Any], tmp_path: Path) -> None:
    """Losses, norms and weights to the bit, with a resume in the middle; a resume in another layout chooses anew."""
    _open(tiny, stages)
    said = train(tmp_path / "first", tiny, "training.steps=2", world_size=stages)
    (name,) = CHOSEN.findall(said)
    assert name != "1f1b", "the case that this test is for"
    for schedule in ("1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipev"):
        assert re.search(rf" \(?{schedule} \d", said), f"the line has no share of {schedule}: {said}"
    assert f"schedule: {name}" in train(tmp_path / "second", tiny, world_size=stages)
    run, named = Path(tiny["run_dir"]), tmp_path / "named"
    train(tmp_path / "third", tiny, f"parallel.pipeline_schedule={name}", f"run_dir={named}", world_size=stages)
    assert yaml.safe_load((run / "config.yaml").read_text())["parallel"]["pipeline_schedule"] == name
    ours_and_theirs = ([(row["loss"], row["grad_norm"]) for row in metrics(each)] for each in (run, named))
    assert next(ours_and_theirs) == next(ours_and_theirs)
    ours, theirs = (read_manifest(found) for each in (run, named) if (found := find_latest(each)[0]) is not None)
    assert ours.step == 4 and ours.files == theirs.files and ours.config["parallel"] == theirs.config["parallel"]
    alone = train(tmp_path / "fourth", tiny, "parallel={}", "training.steps=5", world_size=1)
    assert not CHOSEN.search(alone) and f"parallel.pipeline_schedule '{name}' -> '1f1b'" in alone


def test_a_run_keeps_the_schedule_of_its_checkpoint(tiny: dict[str, Any], tmp_path: Path) -> None:
    """One of before, that had 1F1B without a word, goes on as it was though another is faster; a name overrules it."""
    _open(tiny, 2)
    train(tmp_path / "first", tiny, "parallel.pipeline_schedule=1f1b", "training.steps=1")
    said = train(tmp_path / "second", tiny, "training.steps=2")
    assert re.search(r"schedule: 1f1b [\d.]+% idle \(as in the newest checkpoint", said), said
    train(tmp_path / "third", tiny, "parallel.pipeline_schedule=zero-bubble", "training.steps=3")
    assert "schedule: zero-bubble" in train(tmp_path / "fourth", tiny)


def test_an_unknown_accelerator_leaves_the_format_of_gradients_as_accumulated(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    """Rank 0 decides for ranks that a launcher has started, where no accelerator can be described."""
    tiny["precision"] = {"gradient_reduction_dtype": "auto"}
    tiny["parallel"] = {"data_parallel_size": 2}
    said = train(tmp_path / "first", tiny, fault=(_break_catalogue, ()))
    assert re.search(r"precision.gradient_reduction_dtype: fp32, because .*hardware.yaml", said), said
    written = yaml.safe_load((Path(tiny["run_dir"]) / "config.yaml").read_text())
    assert written["precision"]["gradient_reduction_dtype"] == "fp32"


def _break_catalogue(folder: Path, rank: int) -> None:
    os.environ["XDG_CONFIG_HOME"] = str(folder)
    (folder / "megalite").mkdir(exist_ok=True)
    (folder / "megalite" / "hardware.yaml").write_text("accelerators: 3\n")
