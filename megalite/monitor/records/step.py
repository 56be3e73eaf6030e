"""The record of a step, a line of `metrics.jsonl`: its fields, in the order of the file, and where they are drawn.

A new field stands here and, with its meaning, in docs/observing.md. Who measures it returns it, from `Observer.measure`
or in the loop; all sinks, the curves of pages and the gauges of Prometheus follow. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar, get_type_hints


class FieldCurve(NamedTuple):
    """The curve of a field on pages."""

    title: str
    unit: str
    colour: int  # its place
    is_logarithmic: bool = False
    has_band: bool = True  # from the least to the largest of the steps that share a point
    is_compared: bool = True  # also on the page of several runs


class MetricFamily(NamedTuple):
    """A metric of Prometheus; that of a field is the gauge of its last value."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


class StepRecord(TypedDict, total=False):
    """The fields of a step; files of older versions lack some, and those of newer ones have others."""

    step: Annotated[int, MetricFamily("megalite_step", "gauge", "Number of the last step.")]
    time: Annotated[float, MetricFamily("megalite_last_step_timestamp_seconds", "gauge", "When the last step ended.")]
    loss: Annotated[
        float, MetricFamily("megalite_loss_nats", "gauge", "Training loss of the last step, mean over valid tokens.")
    ]
    grad_norm: Annotated[
        float,
        FieldCurve("Gradient norm", "before clipping", 4, is_logarithmic=True),
        MetricFamily("megalite_gradient_norm", "gauge", "Norm of all gradients of the last step, before clipping."),
    ]
    learning_rate: Annotated[
        float,
        FieldCurve("Learning rate", "per step", 2, has_band=False),
        MetricFamily("megalite_learning_rate", "gauge", "Learning rate of the last step."),
    ]
    loss_scale: Annotated[
        float,
        FieldCurve("Loss scale", "fp16", 3, is_logarithmic=True, has_band=False, is_compared=False),
        MetricFamily("megalite_loss_scale", "gauge", "Factor on the loss of the last step, in fp16."),
    ]
    tokens_seen: int
    samples: list[int]
    tokens_per_second: Annotated[float, FieldCurve("Speed", "tokens/s", 0)]
    samples_per_second: float
    step_time_s: Annotated[float, FieldCurve("Step time", "seconds", 1)]
    data_wait_s: float
    memory_peak_mib: Annotated[float, FieldCurve("Peak memory of rank 0", "MiB", 6, is_compared=False)]
    skipped: bool
    skipped_steps: int
    global_batch_size: int
    sequence_length: int
    evaluation_loss: Annotated[
        float, MetricFamily("megalite_evaluation_loss_nats", "gauge", "Loss of the last evaluation on held-out data.")
    ]
    evaluation_losses: dict[str, float]
    evaluation_s: float
    self_check_s: float
    source_losses: dict[str, float]
    source_targets: dict[str, int]
    save_blocked_s: float
    wall_s: float
    parts_s: dict[str, float]
    communication_share: float
    experts: dict[str, dict[str, float]]
    source_epochs: dict[str, float]
    source_tokens: dict[str, int]
    session_s: float
    goodput: Annotated[
        float,
        FieldCurve("Goodput", "share of the run's time", 2, is_compared=False),
        MetricFamily("megalite_goodput_ratio", "gauge", "Share of the run's time that went into steps that count."),
    ]
    model_flops_utilization: Annotated[
        float, MetricFamily("megalite_model_flops_utilization_ratio", "gauge", "Model FLOP/s over the devices' peak.")
    ]
    gpu_utilization: float
    gpu_power_w: float


_Shown = TypeVar("_Shown", FieldCurve, MetricFamily)


def _shown(kind: type[_Shown]) -> dict[str, _Shown]:
    hints = get_type_hints(StepRecord, include_extras=True).items()
    return {name: one for name, hint in hints for one in getattr(hint, "__metadata__", ()) if isinstance(one, kind)}


CURVES, GAUGES = _shown(FieldCurve), _shown(MetricFamily)


def flat_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record but its step, for services that draw one curve for each name.

    Nested ones are named as `parts/forward`. Lists and texts are left out.
    """
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            group = name.removesuffix("_s")
            numbers |= {f"{group}/{key}": number for key, number in flat_numbers(value).items()}
        elif isinstance(value, int | float) and name != "step":
            numbers[name] = value
    return numbers
