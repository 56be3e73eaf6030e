"""Curves for TensorBoard in the run folder: `tensorboard --logdir RUN_DIR/tensorboard`."""

from __future__ import annotations

from pathlib import Path

from megalite.config import Config
from megalite.monitor.observer import Observer
from megalite.monitor.records.step import StepRecord, flat_numbers

FOLDER = "tensorboard"
WRITTEN_S = 10  # between two writes to disk


class TensorBoardSink(Observer):
    """Writes each number of a record as one curve, by torch's writer.

    A step that is done again hides what was written for it and the steps after it.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder
        self._open_after(first_step)

    def _open_after(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=step + 1, flush_secs=WRITTEN_S)
        self._last_step = step

    def on_step(self, record: StepRecord) -> None:
        step = record["step"]
        if step <= self._last_step:
            self._writer.close()
            self._open_after(step - 1)
        for name, value in flat_numbers(record).items():
            self._writer.add_scalar(name, value, step, walltime=record["time"])
        self._last_step = step

    def close(self) -> None:
        self._writer.close()


def open_sink(config: Config, first_step: int) -> TensorBoardSink | None:
    """Returns the writer if `monitor.tensorboard`."""
    return TensorBoardSink(config.run_dir / FOLDER, first_step) if config.monitor.tensorboard else None
