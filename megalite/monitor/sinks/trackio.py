"""trackio, which keeps its runs on this machine and has the calls of Weights & Biases."""

from __future__ import annotations

from typing import Any

from megalite.config import Config
from megalite.config.sections import TrackioConfig
from megalite.monitor.flat_records import flat_numbers
from megalite.monitor.observer import Observer


class TrackioSink(Observer):
    """Logs to one run of trackio."""

    name = "trackio"

    def __init__(self, options: TrackioConfig, config: dict[str, Any]) -> None:
        import trackio

        self._run = trackio.init(project=options.project, name=options.name, config=config, embed=False)

    def on_step(self, record: dict[str, Any]) -> None:
        self._run.log(flat_numbers(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def open_sink(config: Config, first_step: int) -> TrackioSink | None:
    """Starts a run of trackio if `monitor.trackio.enabled`."""
    options = config.monitor.trackio
    return TrackioSink(options, config.model_dump(mode="json")) if options.enabled else None
