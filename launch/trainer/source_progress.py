"""Adds to the records of a run how far each source of its mix has been read."""

from __future__ import annotations

from typing import Any

from data_pipeline.mix import MixedSamples
from megalite.monitor.observer import Observer

MOST_SOURCES = 32  # that are told with every step; a line of more would outgrow all else in it
RARELY = 100  # steps between lines with more


class SourceProgress(Observer):
    """Adds `source_epochs` and `source_tokens`: what each source has given up to the end of the step."""

    def __init__(self, samples: MixedSamples, total_steps: int) -> None:
        self._samples, self._total_steps = samples, total_steps

    def on_step(self, record: dict[str, Any]) -> None:
        samples, step = self._samples, record["step"]
        if len(samples.sources) > MOST_SOURCES and step % RARELY and step != self._total_steps:
            return
        taken = dict(zip(samples.mix.names, samples.mix.counts(record["samples"][1]), strict=True))
        record["source_epochs"] = {
            name: round(count / samples.sources[name].samples_per_epoch, 6) for name, count in taken.items()
        }
        record["source_tokens"] = {name: count * samples.sequence_length for name, count in taken.items()}
