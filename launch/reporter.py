"""Rank 0's voice: metrics, events, notices, receipt and picture; silent on all other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from launch.data import RunData
from launch.plan.own_run import OwnRun, RankMemory
from launch.rank_environment import Rank
from launch.resume import Start
from launch.run_folder import write_receipt, write_settings
from launch.run_tokenizer import keep_tokenizer
from megalite.config import Config, ResolvedLayout
from megalite.resilience.nonfatal import Nonfatal

if TYPE_CHECKING:
    from megalite.checkpoint.mirror import Report
    from megalite.monitor.sinks.base import Sink
    from megalite.resilience.guards import Intervention
    from megalite.resilience.interval import IntervalPlanner


class Reporter:
    """Open while the run trains. What fails in it is counted and told, and ends nothing."""

    def __init__(
        self, config: Config, layout: ResolvedLayout, rank: Rank, start: Start, data: RunData, own_run: OwnRun
    ) -> None:
        self._config, self._layout, self._start, self._data = config, layout, start, data
        self.own_run = own_run
        self._speaks = rank.rank == 0
        self._sinks: list[Sink] = []
        self._nonfatal = Nonfatal(self.say)
        self.outcome: dict[str, Any] = {"finished": False}

    def __enter__(self) -> Self:
        if self._speaks:
            from megalite.engine.deepspeed_config import deepspeed_config
            from megalite.monitor.events import EVENTS, EventLog
            from megalite.monitor.goodput import Goodput

            write_settings(self._config, deepspeed_config(self._config, self._layout))
            if self._start.hub is not None:
                keep_tokenizer(self._config, self._start.hub.folder)
            with self._nonfatal("the prediction"):
                self.own_run.predict()
            self._write_receipt()
            self._events = EventLog(self._config.run_dir / EVENTS)
            self._goodput = Goodput(
                self._config.run_dir, self._start.step, self.event, world_size=self._layout.world_size
            )
            self._open_sinks()
            for notice in (*self._layout.notices, *self._data.notices, *self._start.notices):
                self.say(notice)
            with self._nonfatal("the prediction"):
                for sentence in self.own_run.predicted():
                    self.say(sentence)
        return self

    def _open_sinks(self) -> None:
        from megalite.monitor.sinks.console import ConsoleSink
        from megalite.monitor.sinks.jsonl import JsonLines
        from megalite.monitor.sinks.wandb import WandbSink

        config, monitor = self._config, self._config.monitor
        self._sinks = [
            JsonLines(config.run_dir / "metrics.jsonl", self._start.step),
            ConsoleSink(config.total_steps, self._start.step, monitor.log_interval),
        ]
        if monitor.wandb.enabled:
            with self._nonfatal("wandb"):
                self._sinks.append(WandbSink(monitor.wandb, config.run_dir, config.model_dump(mode="json")))

    def log(self, record: dict[str, Any]) -> None:
        """A step's record, to all sinks."""
        if not self._speaks:
            return
        with self._nonfatal("goodput"):
            record["goodput"] = round(self._goodput.step(record), 4)
        with self._nonfatal("the prediction"):
            self.own_run.step(record)
        for sink in self._sinks:
            with self._nonfatal(type(sink).__name__):
                sink.log(record)

    def say(self, sentence: str) -> None:
        """A line on the console."""
        if self._speaks:
            with self._nonfatal("the console"):
                print(f"megalite: {sentence}", flush=True)

    def event(self, name: str, **facts: Any) -> None:
        """A line in events.jsonl."""
        if self._speaks:
            with self._nonfatal("events.jsonl"):
                self._events.write(name, **facts)

    def interval_planner(self) -> IntervalPlanner | None:
        """For `checkpoint.interval: auto`, on the rank that decides."""
        if not self._speaks or self._config.checkpoint.interval != "auto":
            return None
        from megalite.monitor.events import EVENTS, read_events
        from megalite.resilience.interval import FailureHistory, IntervalPlanner

        hours = self._config.checkpoint.mean_hours_between_failures
        return IntervalPlanner(FailureHistory.of(read_events(self._config.run_dir / EVENTS), hours), self.say)

    def intervened(self, intervention: Intervention) -> None:
        """What a guard found, and did."""
        self.event("intervened", **intervention.facts)
        self.say(intervention.sentence)

    def mirrored(self, report: Report) -> None:
        """How an upload went."""
        self.event(report.event, **report.facts)
        self.say(report.sentence)

    def ends(self, event: str, untold_s: float) -> None:
        """How training ends, and how long it waited for saves that no record tells of."""
        if self._speaks:
            with self._nonfatal("goodput"):
                self._goodput.end(event, save_blocked_s=untold_s)
                self.say(self._goodput.sentence())

    def compares(self, memory: Sequence[RankMemory | None]) -> None:
        """What was predicted with what was needed; `memory` is each rank's."""
        if self._speaks:
            with self._nonfatal("the prediction"):
                for sentence in self.own_run.ended(memory):
                    self.say(sentence)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sink in self._sinks:
            with self._nonfatal(type(sink).__name__):
                sink.close()
        if not self._speaks:
            return
        if (failures := self._nonfatal.sentence()) != "":
            self.say(failures)
        with self._nonfatal("receipt.json"):
            self._write_receipt(goodput=self._goodput.summary(), failures=self._nonfatal.summary())
        if self._config.monitor.plot:
            with self._nonfatal("loss.png"):
                self._draw()

    def _draw(self) -> None:
        from megalite.monitor.plot import plot_loss
        from megalite.monitor.sinks.jsonl import read_records

        picture = self._config.run_dir / "loss.png"
        plot_loss(read_records(self._config.run_dir / "metrics.jsonl"), picture, str(self._config.run_dir))
        self.say(f"drew {picture}")

    def _write_receipt(self, **more: Any) -> None:
        with self._nonfatal("the prediction"):
            more |= self.own_run.facts()
        facts = {"data_fingerprint": self._data.training.fingerprint, "resumed_from_step": self._start.step}
        write_receipt(self._config, self._layout, facts | {"outcome": self.outcome} | more)
