"""Run logging on rank 0: observers of the steps, notices, events and the receipt; a no-op on other ranks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Self, cast

from data_pipeline.samples.mix import MixedSamples
from launch.runtime.logs import get_logger
from launch.trainer.data.source_progress import SourceProgress
from launch.trainer.prediction_tracker import PredictionTracker, RankMemory, ranks_of_a_host
from launch.trainer.run_pictures import RunPictures
from launch.trainer.run_summary import format_total, warning_of_long_step
from launch.trainer.run_tokenizer import keep_tokenizer
from launch.trainer.start.resume import RunSetup
from launch.trainer.start.run_folder import write_receipt, write_settings
from megalite.checkpoint.fence import EVERY_S, fence
from megalite.monitor.events import EVENTS, EventLog, EventName, read_events
from megalite.monitor.observer import Nonfatal, Observer
from megalite.monitor.records.step import StepRecord
from megalite.monitor.sinks.jsonl import METRICS, stream_records
from megalite.units import plural

if TYPE_CHECKING:
    from megalite.checkpoint.saver import Saved
    from megalite.monitor.steps.breakdown import StepBreakdown
    from megalite.monitor.steps.slow_ranks import SlowRank
    from megalite.resilience.checkpoint_interval import IntervalPlanner

log = get_logger(__name__)


class RunLogger(Observer):
    """Hands what happens to a list of observers while it is open.

    An observer that raises is counted and reported; training goes on. The list is empty on ranks other than 0.
    """

    def __init__(self, setup: RunSetup, prediction: PredictionTracker, progress: Observer) -> None:
        """`progress` is told first, and on ranks above 0 alone."""
        self._progress, self._setup, self._config, self.prediction = progress, setup, setup.config, prediction
        self._is_rank_zero = setup.rank.rank == 0
        self._nonfatal = Nonfatal(self.log_warning if self._is_rank_zero else log.warning)
        self._events = EventLog(self._config.run_dir / EVENTS)
        self._observers: list[Observer] = [progress]
        self._length_is_told = False
        self.outcome: dict[str, Any] = {"finished": False}

    def __enter__(self) -> Self:
        from megalite.monitor.prometheus.host import open_host_metrics

        self._host_metrics = open_host_metrics(self._config, self._nonfatal, log.info)
        if not self._is_rank_zero:
            return self
        from megalite.engine.deepspeed.config import deepspeed_config
        from megalite.monitor.goodput import Goodput, format_steps_without_record
        from megalite.monitor.prometheus.exporter import PrometheusExporter
        from megalite.monitor.sinks import open_sinks

        config, setup = self._config, self._setup
        write_settings(config, deepspeed_config(config, setup.layout))
        if setup.start.tokenizer is not None:
            keep_tokenizer(config, setup.start.tokenizer)
        first_step = setup.start.step
        length = {"total_steps": config.total_steps, "world_size": setup.layout.world_size}
        process = {"host": socket.gethostname(), "process": os.getpid()}
        saved_at = setup.start.manifest.written_at if setup.start.manifest is not None else 0.0
        self._goodput = Goodput(config.run_dir, first_step, self.event, saved_at, **length, **process)
        exporters: list[Observer] = []
        if (host := self._host_metrics) is not None:
            with self._nonfatal(PrometheusExporter.name):
                exporters = [PrometheusExporter(config, setup.layout, first_step, host, self._goodput, self._nonfatal)]
        self._sinks = open_sinks(config, first_step, self._nonfatal)
        training = setup.data.training  # the order in which fields stand in a record
        of_sources = [SourceProgress(training, config.total_steps)] if isinstance(training, MixedSamples) else []
        self._observers = [self._progress, *of_sources, self._goodput, self.prediction, *exporters, *self._sinks]
        self._observers.append(RunPictures(config))
        missing = format_steps_without_record(self._goodput.without_record)
        for notice in (*setup.layout.notices, *setup.data.notices, *setup.start.notices, *missing):
            self.log_notice(notice)
        for reason in setup.start.passed_over:
            self.event("passed_over", step=first_step, reason=reason)
        if setup.start.changes:
            self.event("config_changed", step=first_step, changes=[asdict(change) for change in setup.start.changes])
        self.on_start()
        self._log_length(first_step)
        self._write_receipt()
        return self

    def _log_length(self, step: int) -> None:
        """Logs how long all steps after `step` take, and warns if each of them takes very long, once that is known."""
        prediction = self.prediction.prediction
        if self._length_is_told or prediction is None or prediction.step is None:
            return
        self._length_is_told = True
        batches, end = self._config.batches, self._config.total_steps
        step_s, left, shape = prediction.step.seconds, end - step, batches.shape_after(step)
        if not left:
            return
        with self._nonfatal(self.prediction.name):
            left_s = step_s * ((batches.tokens_after(end) - batches.tokens_after(step)) / shape.tokens)
            log.info(f"{plural(left, 'step')} to go: {format_total(left_s, prediction.why_rough)}")
            if (warning := warning_of_long_step(step_s, shape.global_batch_size)) is not None:
                log.warning(warning)

    def __exit__(self, *_: object) -> None:
        if self._host_metrics is not None:
            with self._nonfatal("Prometheus"):
                self._host_metrics.close()
        if not self._is_rank_zero:
            return
        self._write_last_receipt()  # before the pictures, seconds in which the process may be killed
        self.close()
        if (failures := self._nonfatal.sentence()) != "":
            self.log_warning(failures)
            self._write_last_receipt()

    def _write_last_receipt(self) -> None:
        with self._nonfatal("receipt.json"):
            self._write_receipt(goodput=self._goodput.summary(), failures=self._nonfatal.summary())

    def _for_each(self, call: Callable[[Observer], None]) -> None:
        if self._is_rank_zero:
            fence.check(at_most_every_s=EVERY_S)
        for observer in self._observers:
            with self._nonfatal(observer.name):
                call(observer)

    def on_start(self) -> None:
        self._for_each(lambda observer: observer.on_start())

    def on_step(self, record: StepRecord) -> None:
        for observer in self._observers:
            if type(observer).measure is not Observer.measure:
                with self._nonfatal(observer.name):
                    record = record | observer.measure(record)
        self._for_each(lambda observer: observer.on_step(record))
        if self._is_rank_zero:
            self._log_length(record["step"])

    def before_evaluation(self, record: StepRecord) -> None:
        if self._is_rank_zero:
            record = record | self._goodput.so_far()
            self._for_each(lambda observer: observer.before_evaluation(record))

    def on_late_evaluation(self, found: StepRecord) -> None:
        if self._is_rank_zero:
            with self._nonfatal(METRICS):  # storage may have lost that record
                for known in list(stream_records(self._config.run_dir / METRICS, after_step=found["step"] - 1)):
                    for sink in self._sinks:
                        with self._nonfatal(sink.name):
                            sink.on_step(cast(StepRecord, known | found))

    def on_breakdown(self, breakdown: StepBreakdown) -> None:
        self._for_each(lambda observer: observer.on_breakdown(breakdown))

    def on_slow_rank(self, change: SlowRank) -> None:
        facts = asdict(change)
        self.event("slow_rank_over" if facts.pop("is_over") else "slow_rank", **facts, sentence=change.sentence())
        self.log_notice(change.sentence())

    def on_end(self, ending: str, *, save_blocked_s: float = 0.0) -> None:
        self._for_each(lambda observer: observer.on_end(ending, save_blocked_s=save_blocked_s))

    def sync(self) -> None:
        self._for_each(lambda observer: observer.sync())
        if self._is_rank_zero:
            with self._nonfatal(EVENTS):
                self._events.sync()

    def close(self) -> None:
        self._for_each(lambda observer: observer.close())
        with self._nonfatal(EVENTS):
            self._events.close()

    def on_intervention(self, facts: dict[str, Any], sentence: str) -> None:
        self.event("intervened", **facts)
        self.log_warning(sentence)
        self._for_each(lambda observer: observer.on_intervention(facts, sentence))

    def on_checkpoint(self, saved: Saved, if_failed: str) -> None:
        self._for_each(lambda observer: observer.on_checkpoint(saved, if_failed))
        facts = {"step": saved.step, "blocked_s": round(saved.blocked_s, 4), "total_s": round(saved.total_s, 4)}
        if saved.failure is not None:
            self.event("save_failed", **facts, reason=saved.failure)
            if if_failed:
                self.log_warning(f"step {saved.step} is not saved, {if_failed}: {saved.failure}")
            return
        if self._is_rank_zero:
            self.event("saved", **facts, bytes=saved.bytes, **self._goodput.account(saved.step))
        self.log_notice(
            f"saved {saved.folder} ({saved.bytes / 1e6:.1f} MB; training waited {saved.blocked_s:.2f} s, "
            f"all took {saved.total_s:.2f} s)"
        )

    def log_notice(self, sentence: str) -> None:
        """Logs a line on the console."""
        if self._is_rank_zero:
            with self._nonfatal("the console"):
                log.info(sentence)

    def log_warning(self, sentence: str) -> None:
        """Logs a line on the console about what was lost, or may be; also with --quiet."""
        if self._is_rank_zero:
            with contextlib.suppress(Exception):  # its failure would be reported here
                log.warning(sentence)

    def event(self, name: EventName, **facts: Any) -> None:
        """Appends a line to events.jsonl."""
        if self._is_rank_zero:
            with self._nonfatal(EVENTS):
                self._events.write(name, **facts)

    def log_upload(self, event: EventName, sentence: str, facts: dict[str, Any]) -> None:
        """Logs the result of an upload to the mirror."""
        self.event(event, **facts)
        (self.log_warning if event == "mirror_failed" else self.log_notice)(sentence)

    def log_prediction_error(self, memory: Sequence[RankMemory | None]) -> None:
        """Logs the prediction beside what the run needed; `memory` has one entry per rank, or none."""
        if self._is_rank_zero:
            with self._nonfatal(self.prediction.name):
                self.prediction.log_comparison(memory)

    def interval_planner(self) -> IntervalPlanner | None:
        """Returns the planner of `checkpoint.interval: auto`, on rank 0, which decides for all."""
        if not self._is_rank_zero or self._config.checkpoint.interval != "auto":
            return None
        from megalite.resilience.checkpoint_interval import FailureHistory, IntervalPlanner

        rank, hours = self._setup.rank, self._config.checkpoint.mean_hours_between_failures
        nodes = -(-rank.world_size // ranks_of_a_host(rank, os.environ))
        history = FailureHistory.of(read_events(self._config.run_dir / EVENTS), hours, nodes)
        return IntervalPlanner(history, self.log_notice, background=self._config.checkpoint.background)

    def _write_receipt(self, **facts: Any) -> None:
        setup = self._setup
        with self._nonfatal(self.prediction.name):
            facts |= self.prediction.facts()
        known = {"data_fingerprint": setup.data.training.fingerprint, "resumed_from_step": setup.start.step}
        write_receipt(self._config, setup.layout, known | {"outcome": self.outcome} | facts)
