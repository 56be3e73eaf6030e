"""`training.deterministic`: two runs of one config are the same to the bit, in all they write but times and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.reader import CheckpointReader
from tests.conftest import write_config
from tests.helpers.commands import BIN, metrics, run
from tests.helpers.warm_runs import train

MEASURED = {
    *("tokens_per_second", "samples_per_second", "model_flops_utilization", "step_time_s", "data_wait_s"),
    *("memory_peak_mib", "time", "session_s", "goodput"),
}
MEASURED |= {"evaluation_s", "save_blocked_s", "wall_s", "parts_s", "communication_share"}


@pytest.mark.slow
@pytest.mark.parametrize("tensor_parallel_size", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_two_runs_of_one_config_are_equal_to_the_bit(
    tiny: dict[str, Any], tmp_path: Path, tensor_parallel_size: int
) -> None:
    """Would catch dropout masks that come from a clock or a process, and sums whose order does. The first run is forked
    warm and the second a command, so that nothing of their processes is alike, hash seeds neither."""
    tiny["model"] |= {"attention_dropout": 0.1, "residual_dropout": 0.1, "embedding_dropout": 0.1}
    tiny["parallel"] = {"tensor_parallel_size": tensor_parallel_size, "data_parallel_size": 2, "zero_stage": 2}
    tiny["training"] |= {"deterministic": True, "evaluation": {"interval": 2, "samples": 4}}
    path = write_config(tmp_path / "c.yaml", tiny)
    records, checkpoints = [], []
    train(tmp_path / "session", tiny, f"run_dir={tmp_path / 'first'}", world_size=2 * tensor_parallel_size)
    done = run(BIN / "megalite", "train", path, f"run_dir={tmp_path / 'second'}", "monitor.plot=false")
    assert done.returncode == 0, done.stderr
    for name in ("first", "second"):
        seen = metrics(tmp_path / name)
        records.append([{key: value for key, value in record.items() if key not in MEASURED} for record in seen])
        checkpoints.append(CheckpointReader(tmp_path / name / "checkpoints" / "step_00000004"))
    assert len(records[0]) == 4 and "evaluation_loss" in records[0][-1]
    assert records[0] == records[1]
    first, second = checkpoints
    assert first.manifest.moments, "AdamW's moments are part of what must be equal"
    for kind in ("weight", *first.manifest.moments):
        for tensor in first.manifest.tensors:
            assert torch.equal(first.read(tensor, kind=kind), second.read(tensor, kind=kind)), f"{kind} of {tensor}"
