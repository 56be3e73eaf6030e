"""A run on best-fit samples: what every layout reads, and what `megalite evaluate` finds, are the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.storage.indexed_writer import IndexedWriter
from launch.inference.command_options import EvaluateOptions, ModelPlacement
from launch.trainer.data.packing import pack_data
from megalite.config import Config
from tests.conftest import VOCAB_SIZE
from tests.helpers.commands import metrics
from tests.helpers.warm_runs import train
from tests.ranks.launch.inference.test_evaluate import evaluated

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_resume_on_another_layout_reads_the_same_samples(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Documents of up to 40 tokens in samples of 32: some are cut, some samples are padded. fp32 sums in other orders
    differ by 1e-6; another sample, or a padding that counts, by 1e-2."""
    draw = np.random.default_rng()
    with IndexedWriter(tmp_path / "documents", np.uint16) as writer:
        for length in draw.integers(1, 40, 120).tolist():
            writer.append(draw.integers(0, VOCAB_SIZE, length).astype(np.uint16), np.array([length]))
    tiny["data"] |= {"path": str(tmp_path / "documents"), "document_mask": True, "packing": "best_fit"}
    tiny["training"] |= {"evaluation": {"interval": 2, "samples": 4}}
    tiny["schedule"] = {"name": "constant"}  # which does not depend on the length of the run
    pack_data(Config.model_validate(tiny), lambda sentence: None)
    whole, cut = tiny | {"run_dir": str(tmp_path / "whole")}, tiny | {"run_dir": str(tmp_path / "cut")}
    train(tmp_path / "session", whole, world_size=1)
    train(tmp_path / "session", cut, "parallel.pipeline_parallel_size=2", "training.steps=2")
    train(tmp_path / "session", cut, "training.steps=4", "parallel.tensor_parallel_size=2")
    names = ("step", "loss", "samples", "evaluation_loss")
    expected, found = ([[each.get(name) for name in names] for each in metrics(run["run_dir"])] for run in (whole, cut))
    assert [row[2] for row in found] == [row[2] for row in expected] and len(found) == 4
    assert [row[1] for row in found] == pytest.approx([row[1] for row in expected], rel=1e-5)
    assert found[-1][3] == pytest.approx(expected[-1][3], rel=1e-5)
    own = evaluated(EvaluateOptions(ModelPlacement(whole["run_dir"]), [], []))
    assert own.loss == pytest.approx(expected[-1][3], rel=1e-6)
    shorter = evaluated(EvaluateOptions(ModelPlacement(whole["run_dir"]), [], [], sequence_length=24))
    assert shorter.notice is not None and "packed concat" in shorter.notice
