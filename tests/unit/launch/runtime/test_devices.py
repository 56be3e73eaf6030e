"""What a run believes about its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.runtime.devices import gpu_count

LISTING = "GPU 0: NVIDIA H200 (UUID: GPU-1a2b)\nGPU 1: NVIDIA H200 (UUID: GPU-3c4d)\n"


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("1, 0", 2),
        ("0,1,2,3", 2),  # a setting that came along from a larger machine
        ("7,0", 0),  # CUDA ignores all from the first that does not exist
        ("GPU-3c4d,GPU-ffff", 1),
    ],
)
def test_gpus_are_those_that_are_both_there_and_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_count() == 0, "no nvidia-smi, no GPU"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{LISTING}'\n")
    program.chmod(0o755)
    assert gpu_count() == count
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert gpu_count() == 0
