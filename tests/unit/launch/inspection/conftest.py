"""Run folders as training leaves them, made without training."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.runtime.run_lock import LOCK
from megalite.config import Config
from tests.helpers.attempts import save
from tests.helpers.sizes import TINY_SIZES

MakeRun = Callable[..., Path]
EVALUATION_S = 400.0


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Makes a run of 100 steps, the last of `steps` of a second each having ended `age_s` ago.

    With `interval` each evaluation took `EVALUATION_S`.
    """

    def make(
        name: str = "run",
        steps: int = 30,
        age_s: float = 5.0,
        ending: str | None = None,
        saved: int | None = 20,
        interval: int = 0,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = Config.model_validate(
            {
                "run_dir": str(folder),
                "model": TINY_SIZES,
                "data": {"path": "unused"},
                "precision": {"dtype": "fp32"},
                "training": {
                    "global_batch_size": 4,
                    "micro_batch_size": 2,
                    "sequence_length": 32,
                    "steps": 100,
                    "evaluation": {"interval": interval},
                },
            }
        )
        (folder / "config.yaml").write_text(config.to_yaml())
        layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1, "zero_stage": 1}
        host = socket.gethostname()
        (folder / "receipt.json").write_text(json.dumps({"layout": layout, "machine": {"host": host}}))

        def after_s(step: int) -> float:
            """From the start to the end of a step, whose own evaluation comes later."""
            return 10 + step + (EVALUATION_S * ((step - 1) // interval) if interval else 0)

        began = time.time() - age_s - after_s(steps)
        facts: dict[str, Any] = {"host": host, "process": 2**22 + 1}  # above the largest process id: it is gone
        (folder / LOCK).write_text(json.dumps(facts | {"time": began - 1}))
        events = [{"time": began, "event": "started", "step": 0, "before_s": 9.0, **facts}]
        if saved is not None:
            save(folder, saved)
            events.append({"time": began + after_s(saved), "event": "saved", "step": saved, "bytes": 1000})
        if ending is not None:
            events.append({"time": began + after_s(steps), "event": ending, "session_s": 19.0 + steps})
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        records = [
            {
                "step": step,
                "time": began + after_s(step),
                "loss": 4 - step / 100,
                "step_time_s": 0.9,
                "tokens_per_second": 142.0,
                "goodput": 0.5,
                **({"evaluation_s": EVALUATION_S} if interval and step % interval == 0 else {}),
            }
            for step in range(1, steps + 1)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return folder

    return make
