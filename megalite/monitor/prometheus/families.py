"""Names, kinds and labels of all metrics, and how they are rendered: the one place that knows them.

In: series by name, from `RunTotals` and `GpuSampler`. Out: families of prometheus_client, made at the scrape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megalite.monitor.records.step import GAUGES, MetricFamily

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

Labels = tuple[str, ...]
Series = Mapping[Labels, float]
Values = Mapping[str, Series]  # by the name of the family; of a histogram, counts by upper bound


STEP_SECONDS_SUM = "megalite_step_seconds_sum"  # the sum of the histogram, beside its counts
OUTCOMES = ("taken", "skipped", "lost")
SAVED, FAILED = "saved", "failed"
DIRECTIONS = ("transmit", "receive")
BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
"""Upper bounds of the histogram of steps, in seconds."""

_STAGE = ("stage",)
_COMMUNICATION = ("stage", "axis", "operation")
_RANK = ("rank", "stage", "host")
OF_THE_RUN = (
    MetricFamily(
        "megalite_run_info", "gauge", "Facts of the run.", ("version", "layout", "model", "dtype", "zero_stage")
    ),
    *GAUGES.values(),
    MetricFamily("megalite_source_loss_nats", "gauge", "Last training loss of a source of the data.", ("source",)),
    MetricFamily("megalite_tokens_total", "counter", "Tokens of all steps done, also of those lost later."),
    MetricFamily("megalite_samples_total", "counter", "Samples of all steps done, also of those lost later."),
    MetricFamily(
        "megalite_steps_total",
        "counter",
        "Steps done, taken or skipped by a guard; lost ones, which a restart or a rollback does again, are among them.",
        ("outcome",),
    ),
    MetricFamily("megalite_step_seconds", "histogram", "Wall time of a step, without evaluation, saves and logging."),
    MetricFamily(
        "megalite_step_part_seconds_total",
        "counter",
        "Wall time of steps by what it went into, mean over the ranks of a stage.",
        ("stage", "part"),
    ),
    MetricFamily(
        "megalite_pipeline_idle_ratio", "gauge", "Share of the last pipeline's span in which a stage was idle.", _STAGE
    ),
    MetricFamily(
        "megalite_communication_seconds_total",
        "counter",
        "Time in which the first rank of a stage was held up by communication in training steps.",
        _COMMUNICATION,
    ),
    MetricFamily(
        "megalite_communication_bytes_total",
        "counter",
        "Bytes that the first rank of a stage handed to communication in training steps.",
        _COMMUNICATION,
    ),
    MetricFamily(
        "megalite_communication_calls_total",
        "counter",
        "Operations of communication of a stage's first rank in training steps.",
        _COMMUNICATION,
    ),
    MetricFamily(
        "megalite_run_seconds_total", "counter", "Wall time of the run by category of goodput.", ("category",)
    ),
    MetricFamily("megalite_checkpoint_saves_total", "counter", "Saves of checkpoints by result.", ("result",)),
    MetricFamily("megalite_checkpoint_blocked_seconds_total", "counter", "Time in which training waited for saves."),
    MetricFamily("megalite_checkpoint_last_timestamp_seconds", "gauge", "When the last checkpoint was complete."),
    MetricFamily("megalite_checkpoint_interval_seconds", "gauge", "Median time between the last checkpoints."),
    MetricFamily("megalite_interventions_total", "counter", "Interventions of guards.", ("action",)),
    MetricFamily("megalite_monitor_failures_total", "counter", "Failures of monitoring, by what failed.", ("what",)),
    MetricFamily("megalite_memory_peak_bytes", "gauge", "Peak memory of a rank so far.", _RANK),
    MetricFamily(
        "megalite_rank_relative_speed_ratio",
        "gauge",
        "Median time of own work of the other ranks of the stage over that of this rank, in the last 50 steps or more.",
        _RANK,
    ),
)
_GPU = ("host", "gpu", "uuid")
OF_GPUS = (
    MetricFamily("megalite_gpu_utilization_ratio", "gauge", "Share of time in which the GPU ran a kernel.", _GPU),
    MetricFamily("megalite_gpu_memory_used_bytes", "gauge", "Memory of the GPU in use.", _GPU),
    MetricFamily("megalite_gpu_memory_total_bytes", "gauge", "Memory of the GPU.", _GPU),
    MetricFamily("megalite_gpu_power_watts", "gauge", "Power that the GPU draws.", _GPU),
    MetricFamily("megalite_gpu_temperature_celsius", "gauge", "Temperature of the GPU.", _GPU),
    MetricFamily("megalite_gpu_sm_clock_hertz", "gauge", "Clock of the streaming multiprocessors.", _GPU),
    MetricFamily("megalite_gpu_energy_joules_total", "counter", "Energy since the driver was loaded.", _GPU),
    MetricFamily(
        "megalite_gpu_throttled_info", "gauge", "1 while the clock is lowered for this reason.", (*_GPU, "reason")
    ),
    MetricFamily("megalite_gpu_ecc_errors_total", "counter", "Errors of memory in the GPU's life.", (*_GPU, "kind")),
    MetricFamily("megalite_gpu_nvlink_bytes_total", "counter", "Bytes over all NVLinks.", (*_GPU, "direction")),
)
COUNTED = frozenset(one.name for one in OF_THE_RUN if one.kind != "gauge") | {STEP_SECONDS_SUM}
"""Names of what never falls, over all sessions of a run."""


def rendered(
    families: tuple[MetricFamily, ...], values: Values, common: Mapping[str, str] | None = None
) -> Iterator[Metric]:
    """Yields the families that have values; `common` are labels of all series."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    common = common or {}
    for family in families:
        series, labels = values.get(family.name), [*common, *family.labels]
        if not series:
            continue
        if family.kind == "histogram":
            histogram = HistogramMetricFamily(family.name, family.help, labels=labels)
            histogram.add_metric([*common.values()], *_cumulative(series, values[STEP_SECONDS_SUM][()]))
            yield histogram
            continue
        made: Any = (CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily)(
            family.name, family.help, labels=labels
        )
        for key, value in series.items():
            made.add_metric([*common.values(), *key], value)
        yield made


def _cumulative(counts: Series, total: float) -> tuple[list[tuple[str, float]], float]:
    so_far, buckets = 0.0, []
    for (bound,), count in counts.items():
        so_far += count
        buckets.append((bound, so_far))
    return buckets, total


def bucket_of(seconds: float) -> Labels:
    """Returns the bucket of a step."""
    return (next((str(bound) for bound in BUCKETS if seconds <= bound), "+Inf"),)


EMPTY_BUCKETS: Series = dict.fromkeys([*((str(bound),) for bound in BUCKETS), ("+Inf",)], 0.0)
