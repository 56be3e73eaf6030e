"""`metrics.jsonl`: one object per step, appended as it happens; always on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from megalite.checkpoint.durable_files import write_durably
from megalite.config import Config
from megalite.monitor.events import append_line, read_lines
from megalite.monitor.observer import Observer


class JsonLinesSink(Observer):
    """Appends records to `path`.

    When a step is done again, after an interruption or a rollback, its earlier record and those after it are dropped.
    """

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._path = path
        self._keep_until(resumed_step)

    def _keep_until(self, step: int) -> None:
        kept = [record for record in read_records(self._path) if record["step"] <= step]
        write_durably(self._path, "".join(map(_line, kept)).encode())
        self._last_step = step

    def on_step(self, record: dict[str, Any]) -> None:
        if record["step"] <= self._last_step:
            self._keep_until(record["step"] - 1)
        append_line(self._path, _line(record))
        self._last_step = record["step"]


def open_sink(config: Config, first_step: int) -> JsonLinesSink:
    """Opens metrics.jsonl; drops records of steps after `first_step`, which the run does again."""
    return JsonLinesSink(config.run_dir / "metrics.jsonl", first_step)


def read_records(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Returns the records of a run; `last_bytes` and what is skipped as in `read_lines`."""
    return [record for record in read_lines(path, last_bytes) if "step" in record]


def _line(record: dict[str, Any]) -> str:
    return json.dumps(_finite(record)) + "\n"


def _finite(value: Any) -> Any:
    """Returns a value that JSON can hold, which has no NaN or infinity: a skipped step's norm is null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
