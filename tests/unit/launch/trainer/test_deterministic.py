"""`training.deterministic` reaches torch and cuBLAS in the rank itself, whatever launcher started it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
import torch

import launch.train
from launch.runtime.rank_environment import Rank
from launch.runtime.startup_progress import StartupProgress
from megalite.config import Config
from megalite.engine.deepspeed import process_groups as distributed


class _JoiningError(Exception):
    """The moment at which a rank would join the others, and so start CUDA."""


@pytest.fixture
def as_before() -> Iterator[None]:
    fills = torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fills


@pytest.mark.parametrize("is_on", [True, False], ids=["on", "off"])
def test_a_rank_is_deterministic_before_it_joins_the_others(
    tiny: dict[str, Any], is_on: bool, monkeypatch: pytest.MonkeyPatch, as_before: None
) -> None:
    """On a CPU runs are equal without it too, so the test of two runs would not miss it."""
    seen: list[Any] = []

    def join(local_rank: int, timeout: timedelta, rendezvous: None) -> None:
        seen.append((torch.are_deterministic_algorithms_enabled(), os.environ.get("CUBLAS_WORKSPACE_CONFIG")))
        raise _JoiningError

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be restored")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(distributed, "start_distributed", join)
    tiny["training"]["deterministic"] = is_on
    with pytest.raises(_JoiningError):
        alone = Rank(0, 0, 1)
        launch.train.run(Config.model_validate(tiny), alone, ExitStack(), StartupProgress(alone, time.monotonic()))
    assert seen == [(True, ":4096:8") if is_on else (False, None)]
    assert torch.utils.deterministic.fill_uninitialized_memory is not is_on
