"""The observer of rank 0 that hands the run to Prometheus.

On the training thread it only counts; whoever asks for metrics renders the last snapshot, in a thread of his own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megalite.config import Config, ResolvedLayout
from megalite.config.versions import own_version
from megalite.monitor.goodput import Goodput
from megalite.monitor.observer import Nonfatal, Observer
from megalite.monitor.prometheus.endpoint import TARGETS, Rendering, TextfileWriter, label_of
from megalite.monitor.prometheus.families import OF_GPUS, OF_THE_RUN, Labels, Series, Values, rendered
from megalite.monitor.prometheus.host import HostMetrics
from megalite.monitor.prometheus.totals import SHOWN, RunTotals, keep_shown
from megalite.monitor.records.step import StepRecord
from megalite.monitor.source_losses import MOST_SOURCES
from megalite.monitor.steps.breakdown import StepBreakdown
from megalite.monitor.steps.slow_ranks import WINDOW, relative_speeds
from megalite.units import MIB

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from megalite.checkpoint.saver import Saved


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment; nobody changes it."""

    values: Values
    breakdowns: tuple[StepBreakdown, ...]  # the last ones, together of WINDOW steps or more


class PrometheusExporter(Observer):
    """Counts what happens, and renders the last snapshot at a scrape and for the textfile."""

    name = "Prometheus"

    def __init__(
        self,
        config: Config,
        layout: ResolvedLayout,
        resumed_step: int,
        host: HostMetrics,
        goodput: Goodput,
        nonfatal: Nonfatal,
    ) -> None:
        """Make it when `goodput` is made and nothing is dropped from metrics.jsonl yet. Raises OSError."""
        self._config, self._host = config, host
        shape = config.batches.shape_after(resumed_step)
        self._totals = RunTotals.of_run(config.run_dir, resumed_step, shape.tokens, shape.samples)
        self._goodput, self._nonfatal = goodput, nonfatal
        sizes = f"tp{layout.tensor_parallel_size} pp{layout.pipeline_parallel_size} dp{layout.data_parallel_size}"
        more = {"cp": layout.context_parallel_size, "ep": layout.expert_parallel_size}
        sizes += "".join(f" {name}{size}" for name, size in more.items() if size > 1)
        facts = (own_version(), sizes, config.model.model_type, config.precision.dtype, str(layout.zero_stage))
        self._info: Values = {"megalite_run_info": {facts: 1.0}}
        self._recent: deque[StepBreakdown] = deque()
        self._snapshot = Snapshot(self._totals.values(), ())
        self._lock, self._shown, self._has_ended = threading.Lock(), self._snapshot, False
        host.registry.register(Rendering(lambda: self._rendered({}), nonfatal))
        self._textfile: TextfileWriter | None = None
        if (folder := config.monitor.prometheus.textfile) is not None:
            self._textfile = TextfileWriter(folder, config.run_dir, self._render_for_textfile, nonfatal)

    def measure(self, record: StepRecord) -> StepRecord:
        """Returns `gpu_utilization` and `gpu_power_w` of rank 0's host, where its GPUs are read."""
        return self._host.gpus.record() if self._host.gpus is not None else {}

    def on_step(self, record: StepRecord) -> None:
        """Counts a step."""
        self._totals.add_record(record)
        if len(self._config.data.sources) <= MOST_SOURCES:
            self._totals.add_source_losses(record.get("source_losses", {}))
        self._totals.raise_to(
            "megalite_run_seconds_total", {(name,): value for name, value in self._goodput.seconds().items()}
        )
        self._snapshot = Snapshot(self._totals.values(), tuple(self._recent))
        if self._textfile is not None and record["step"] % self._config.monitor.log_interval == 0:
            self._textfile.ask()

    def on_breakdown(self, breakdown: StepBreakdown) -> None:
        self._totals.add_line(breakdown.line())
        self._recent.append(breakdown)
        while sum(one.steps for one in self._recent) - self._recent[0].steps >= WINDOW:
            self._recent.popleft()

    def on_checkpoint(self, saved: Saved, if_failed: str) -> None:
        self._totals.add_save(time.time(), is_complete=saved.failure is None)
        self._snapshot = Snapshot(self._totals.values(), self._snapshot.breakdowns)

    def on_intervention(self, facts: dict[str, Any], sentence: str) -> None:
        self._totals.add_intervention(str(facts["action"]))

    def on_end(self, ending: str, *, save_blocked_s: float = 0.0) -> None:
        self._has_ended = True
        self._totals.add_end(save_blocked_s)
        self._snapshot = Snapshot(self._totals.values(), self._snapshot.breakdowns)

    def sync(self) -> None:
        self._keep(self._snapshot)  # a resume then counts only what is behind this save

    def close(self) -> None:
        """Takes back what would make an ended run look like a silent one; after a crash it stays."""
        if self._textfile is not None:
            self._textfile.close(remove=self._has_ended)
        if self._has_ended:
            with suppress(OSError):
                (self._config.run_dir / TARGETS).unlink(missing_ok=True)

    def _render_for_textfile(self) -> Iterator[Metric]:
        common = {"run": label_of(self._config.run_dir)}
        yield from self._rendered(common)
        if self._host.gpus is not None:
            yield from rendered(OF_GPUS, self._host.gpus.values, common)

    def _rendered(self, common: Mapping[str, str]) -> Iterator[Metric]:
        snapshot = self._snapshot
        self._keep(snapshot)
        values = {**self._info, **snapshot.values}
        failures: dict[Labels, float] = {(self.name,): 0.0}
        failures |= {(what,): float(one["count"]) for what, one in self._nonfatal.summary().items()}
        values["megalite_monitor_failures_total"] = failures
        if self._config.monitor.prometheus.per_rank and snapshot.breakdowns:
            values |= _of_ranks(snapshot.breakdowns)
        return rendered(OF_THE_RUN, values, common)

    def _keep(self, snapshot: Snapshot) -> None:
        """Writes down what is about to be shown, so that the next session does not show less."""
        with self._lock, self._nonfatal(SHOWN):
            if snapshot is not self._shown:
                keep_shown(self._config.run_dir / SHOWN, snapshot.values)
                self._shown = snapshot


def _of_ranks(breakdowns: tuple[StepBreakdown, ...]) -> dict[str, Series]:
    """Returns the series of each rank; one that has recorded no work, or is alone in its stage, has no speed."""
    last = breakdowns[-1]
    ranks = enumerate(zip(last.stage_of_ranks, last.host_of_ranks, strict=True))
    labels = [(str(rank), str(stage), host) for rank, (stage, host) in ranks]
    own = np.sum([seconds for one in breakdowns for seconds in one.own_s.values()], axis=0)
    return {
        "megalite_memory_peak_bytes": {key: mib * MIB for key, mib in zip(labels, last.memory_peak_mib, strict=True)},
        "megalite_rank_relative_speed_ratio": {
            labels[rank]: speed for rank, speed in relative_speeds(own, last.stage_of_ranks).items()
        },
    }
