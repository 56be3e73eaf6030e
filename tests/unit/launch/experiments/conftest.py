"""Run folders whose steps took what a test says, made without training."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from megalite.config import Config
from megalite.monitor.steps.parts import PARTS
from tests.helpers.sizes import TINY_SIZES

MeasuredRun = Callable[..., Path]


def write_measured_run(
    folder: Path,
    parts_s: Mapping[str, float],
    *,
    data_parallel_size: int = 1,
    global_batch_size: int = 8,
    steps: int = 8,
    warm_up: int = 2,
    predicted_s: float | None = None,
    peaks_mib: tuple[float, ...] = (100.0,),
    changes: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the files of a finished run, whose steps after the warm-up took the sum of `parts_s`."""
    folder.mkdir(parents=True)
    values: dict[str, Any] = {
        "run_dir": str(folder),
        "model": TINY_SIZES,
        "data": {"path": "unused"},
        "precision": {"dtype": "fp32"},
        "parallel": {"data_parallel_size": data_parallel_size},
        "training": {
            "global_batch_size": global_batch_size,
            "micro_batch_size": 1,
            "sequence_length": 32,
            "steps": warm_up + steps,
        },
        **(changes or {}),
    }
    (folder / "config.yaml").write_text(Config.model_validate(values).to_yaml())
    layout = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": data_parallel_size,
        "zero_stage": 1,
    }
    receipt = {
        "layout": layout,
        "prediction": {"step_time_s": predicted_s, "rough": "a typical CPU, not yours"},
        "measured": {"ranks": [{"peak_mib": peak} for peak in peaks_mib]},
    }
    (folder / "receipt.json").write_text(json.dumps(receipt))
    lines = []
    for step in range(1, warm_up + steps + 1):
        slower = 10.0 if step <= warm_up else 1.0  # a warm-up that counted would show
        parts = {name: slower * parts_s.get(name, 0.0) for name in PARTS}
        # what comes between steps: counted, it would hide any difference
        parts["checkpoint"] = 5.0 if step == warm_up + 1 else 0.0
        record = {
            "step": step,
            "time": 1000.0 + step,
            "step_time_s": slower * sum(parts_s.values()),
            "memory_peak_mib": 1.0,
            "parts_s": parts,
            "wall_s": sum(parts.values()),
        }
        lines.append(json.dumps(record))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    started = {"time": 1000.0, "event": "started", "step": 0}
    (folder / "events.jsonl").write_text(f"{json.dumps(started)}\n{json.dumps({'time': 2000.0, 'event': 'ended'})}\n")
    return folder


@pytest.fixture
def measured_run(tmp_path: Path) -> MeasuredRun:
    """Makes such a run by name, in a folder of its own."""
    return lambda name, parts_s, **options: write_measured_run(tmp_path / name, parts_s, **options)
