"""Where a run starts, in the cases that are no mistake (those are in test_mistakes.py)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from launch.data import open_data
from launch.resume import checkpoints_of, find_start
from megalite.checkpoint.manifest import find_latest
from megalite.config import Config
from tests.launch.test_mistakes import own_checkpoint

DROPOUT = {"attention_dropout": 0.1, "residual_dropout": 0.2, "embedding_dropout": 0.3}


@pytest.mark.parametrize("saved", [{}, DROPOUT], ids=["turned on", "turned off"])
def test_a_run_goes_on_with_another_dropout(saved: dict[str, float], tiny: dict[str, Any], tmp_path: Path) -> None:
    """It changes nothing about what the checkpoint computes, so it must not count as another model."""
    before = copy.deepcopy(tiny)
    before["model"] |= saved
    own_checkpoint()(before, tmp_path)
    tiny["model"] |= DROPOUT if not saved else {}
    config = Config.model_validate(tiny)
    own, skipped = find_latest(checkpoints_of(config))
    start = find_start(config, open_data(config), own, skipped)
    assert start.is_resume and start.step == 2
