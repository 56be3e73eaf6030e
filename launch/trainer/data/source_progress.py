"""Adds to the records of a run how far each source of its mix has been read, and tells its loss at the end."""

from __future__ import annotations

from data_pipeline.samples.mix import MixedSamples
from launch.runtime.logs import get_logger
from megalite.monitor.observer import Observer
from megalite.monitor.records.step import StepRecord
from megalite.monitor.source_losses import MOST_SOURCES, is_told

log = get_logger(__name__)


class SourceProgress(Observer):
    """Adds `source_epochs` and `source_tokens`: what each source has given up to the end of the step."""

    def __init__(self, samples: MixedSamples, total_steps: int) -> None:
        self._samples, self._total_steps = samples, total_steps
        self._losses: dict[str, float] = {}  # the last of each source

    def measure(self, record: StepRecord) -> StepRecord:
        samples, step = self._samples, record["step"]
        self._losses |= record.get("source_losses", {})
        if not is_told(len(samples.sources), step, self._total_steps):
            return {}
        taken = dict(zip(samples.mix.names, samples.mix.counts(record["samples"][1]), strict=True))
        epochs = {name: round(count / samples.sources[name].samples_per_epoch, 6) for name, count in taken.items()}
        tokens = {name: count * samples.sequence_length for name, count in taken.items()}
        return {"source_epochs": epochs, "source_tokens": tokens}

    def on_end(self, ending: str, *, save_blocked_s: float = 0.0) -> None:
        """Logs the last training loss of each source."""
        if 1 < len(self._losses) <= MOST_SOURCES:
            losses = ", ".join(f"{name} {loss:.4f}" for name, loss in sorted(self._losses.items()))
            log.info(f"the last training loss of each source: {losses}")
