"""trackio, which keeps its runs on this machine and has the calls of Weights & Biases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.config import Config
from megalite.config.tracking import TrackioConfig
from megalite.monitor.observer import Observer
from megalite.monitor.records.step import StepRecord, flat_numbers
from megalite.monitor.tracking_run import TrackingRun


class TrackioSink(Observer):
    """Logs to one run of trackio, the same in all sessions, which it knows by its name.

    A step that is done again gets a second point.
    """

    name = "trackio"

    def __init__(self, options: TrackioConfig, run_dir: Path, config: dict[str, Any]) -> None:
        import trackio

        kept = TrackingRun(run_dir, "trackio")
        name = kept.name()
        self._run = trackio.init(
            project=options.project,
            name=name or options.name,
            group=options.group or str(run_dir),
            resume="allow" if name else "never",
            config=config,
            embed=False,
        )
        kept.keep(self._run.name)

    def on_step(self, record: StepRecord) -> None:
        self._run.log(flat_numbers(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def open_sink(config: Config, first_step: int) -> TrackioSink | None:
    """Starts a run of trackio, or goes on with that of an earlier session, if `monitor.trackio.enabled`."""
    options = config.monitor.trackio
    return TrackioSink(options, config.run_dir, config.model_dump(mode="json")) if options.enabled else None
