"""`metrics.jsonl`: one object per step, appended as it happens; always on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from megalite.config import Config
from megalite.monitor.line_files import LineFile, stream_lines
from megalite.monitor.observer import Observer
from megalite.monitor.records.step import StepRecord

METRICS = "metrics.jsonl"


class JsonLinesSink(Observer):
    """Appends records to a file.

    When a step is done again, after an interruption or a rollback, its earlier record and those after it are dropped.
    """

    name = METRICS

    def __init__(self, path: Path, resumed_step: int) -> None:
        self._file, self._last_step = LineFile(path), resumed_step
        self._file.cut_after(resumed_step)

    def on_step(self, record: StepRecord | dict[str, Any]) -> None:
        step: int = record["step"]
        is_again, self._last_step = step <= self._last_step, step
        if is_again:
            with suppress(OSError):  # it is tried again, and reported, by `append`
                self._file.cut_after(step - 1)
        fields: dict[str, Any] = {**record}
        ordered = {name: fields[name] for name in StepRecord.__annotations__ if name in fields} | fields
        line = to_json(ordered, inf_nan_mode="null", ensure_ascii=True)  # the norm of a skipped step is null
        self._file.append(line.decode() + "\n")

    before_evaluation = on_step

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


def open_sink(config: Config, first_step: int) -> JsonLinesSink:
    """Opens metrics.jsonl; drops records of steps after `first_step`, which the run does again."""
    return JsonLinesSink(config.run_dir / METRICS, first_step)


def stream_records(path: Path, last_bytes: int | None = None, *, after_step: float = 0) -> Iterator[dict[str, Any]]:
    """Yields the records of a run; `last_bytes`, `after_step` and what is skipped as in `stream_lines`."""
    return filter(is_record, stream_lines(path, last_bytes, after_step=after_step))


def is_record(value: Mapping[str, Any]) -> bool:
    """Returns whether an object of a file is the record of a step: anybody may have added a line."""
    step, loss = value.get("step"), value.get("loss")
    is_step = isinstance(step, int | float) and not isinstance(step, bool) and step >= 1 and step == step // 1
    return is_step and (loss is None or isinstance(loss, int | float))
