"""Training with products in float8 learns what training in bf16 does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_config
from tests.helpers.commands import BIN, metrics, run

STEPS, LAST = 200, 20  # the mean of the last steps' losses: those of one batch spread by several percent


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1500)
def test_two_hundred_steps_on_text_end_within_a_percent_of_bf16(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Would catch scales or casts whose errors add up over steps, as those of a product that loses its small gradients
    do. All runs have the same weights, batches and schedule."""
    tiny["model"] |= {"hidden_size": 64, "intermediate_size": 160, "max_position_embeddings": 64}
    tiny["precision"] = {"dtype": "bf16"}
    tiny["training"] |= {"global_batch_size": 8, "micro_batch_size": 8, "sequence_length": 64, "steps": STEPS}
    tiny["optimizer"] = {"learning_rate": 3e-3}
    tiny["checkpoint"] = {"interval": 0, "save_last": False}
    path = write_config(tmp_path / "c.yaml", tiny)
    ends = {}
    for recipe in ("none", "rowwise", "tensorwise"):
        words = (f"run_dir={tmp_path / recipe}", f"precision.float8={recipe}")
        done = run(BIN / "megalite", "train", path, *words, timeout_s=500)
        assert done.returncode == 0, f"{recipe}: {done.stderr}"
        assert ("emulated on the CPU" in done.stderr + done.stdout) == (recipe != "none")
        losses = [record["loss"] for record in metrics(tmp_path / recipe)]
        assert losses[0] - losses[-1] > 1.0, "nothing was learned that could be compared"
        ends[recipe] = sum(losses[-LAST:]) / LAST
    for recipe in ("rowwise", "tensorwise"):
        assert ends[recipe] != ends["none"]
        assert abs(ends[recipe] / ends["none"] - 1) < 0.01, ends
