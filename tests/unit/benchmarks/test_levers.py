"""Levers of the GPU day: a config takes every option of theirs, and steps are drawn, timed and told as they should."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu_day import lever_step
from benchmarks.gpu_day.levers import LEVERS, ROWS
from benchmarks.gpu_day.profile_step import random_batches
from benchmarks.gpu_day.summary import _levers
from megalite.config import Config, ConfigError, load_config
from megalite.planner.cost.stage_parameters import parameters

PARAMETERS = {  # as the hub counts them; of Qwen3-30B-A3B without 44 of its 48 layers
    "levers-1b": 1_235_814_400,
    "levers-1b-documents": 1_235_814_400,
    "levers-3b": 3_212_749_824,
    "levers-gemma-2-2b": 2_614_341_888,
    "levers-qwen3-moe-4-layers": 30_532_122_624 - 44 * 623_120_640,
}


def written(tmp_path: Path, row: str) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(ROWS[row].config(tmp_path / "run")))
    return path


@pytest.mark.parametrize("row", ROWS)
def test_a_config_takes_every_lever_of_its_row(row: str, tmp_path: Path) -> None:
    path = written(tmp_path, row)
    for lever in ROWS[row].levers:
        if "qwen3-moe" in row and lever == "compiled blocks":
            with pytest.raises(ConfigError, match="experts"):
                load_config(path, LEVERS[lever])
            continue
        model = load_config(path, LEVERS[lever]).model
        assert parameters(model) == PARAMETERS.get(row, parameters(model))
    window = model.sliding_window
    assert window is None or window < ROWS[row].sequence, "no token would be outside of it"
    load_tiny = Config.model_validate(ROWS[row].tiny().config(tmp_path / "run"))
    assert parameters(load_tiny.model) < 1e6 and load_tiny.model.model_type == model.model_type


def test_what_is_refused_or_does_not_fit_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "levers-qwen3-moe-4-layers")
    refused = lever_step.measure(path, "cpu", 0, LEVERS["compiled blocks"])
    assert list(refused) == ["refused"] and "blocks with experts" in refused["refused"]

    def too_large(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has")

    monkeypatch.setattr(lever_step, "step_of", too_large)
    assert lever_step.measure(path, "cpu", 0, ()) == {"refused": "CUDA out of memory. Tried to allocate 20.00 GiB."}
    lines = _levers({"compiled blocks": refused, "eager": {"passed": False, "problem": "it\nbroke"}})
    assert "blocks with experts" in lines[-2] and lines[-1].startswith("| eager | it broke |")
    assert len({line.count("|") for line in lines}) == 1


def test_the_table_has_what_was_measured() -> None:
    item = {"tokens_per_second": 54321.0, "model_tflops": 456.7, "mfu": 0.4618, "memory_peak_gib": 42.42}
    counted = {"kernels": 2000, "idle": 0.031, "host_syncs": {"cudaStreamSynchronize": 1, "cudaMemcpy": 2}}
    assert _levers({"eager": item | counted})[-1] == "| eager | 54,321 | 456.7 | 46.2% | 42.42 | 2,000 | 3.1% | 3 |"


def test_documents_begin_anew_and_their_last_token_has_no_target(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, "levers-1b-documents"))
    batches = random_batches(config, np.random.default_rng(), 100)
    assert len(batches) == 4 and all(batch.tokens.shape == (2, 8192) for batch in batches)
    positions, targets = (
        np.concatenate([getattr(batch, name) for batch in batches]) for name in ("positions", "targets")
    )
    begins = positions == 0
    assert begins[:, 0].all() and 80 < positions.size / begins.sum() < 125
    assert ((np.diff(positions) == 1) | begins[:, 1:]).all()
    assert ((targets[:, :-1] == -100) == begins[:, 1:]).all()
    assert {batch.global_valid_targets for batch in batches} == {int((targets != -100).sum())}
    assert all(batch.positions is None for batch in random_batches(config, np.random.default_rng(), 0))


def test_a_loss_is_read_when_the_next_step_has_begun() -> None:
    told: list[str] = []

    class Begun(SimpleNamespace):
        @property
        def loss(self) -> float:
            told.append(f"read {self.number}")
            return 1.0

    def step() -> Any:
        number = sum(line.startswith("begin") for line in told)
        told.append(f"begin {number}")
        return Begun(number=number)

    assert lever_step.timed(step, "cpu") < 1
    assert told == ["begin 0", "read 0", "begin 1", "begin 2", "read 1", "read 2"]
