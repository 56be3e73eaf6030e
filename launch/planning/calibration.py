"""Fits the one constant of an accelerator, its efficiency, to finished runs. No torch here.

Minimises the squared errors of the logarithms of the step times, so that a step of a second and one of a minute weigh
the same. Nothing else is fitted, and nothing per run.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launch.errors import LaunchError
from launch.prediction.prediction import WARM_UP_STEPS
from megalite.config import ConfigError, load_saved_config
from megalite.config.base import PositiveInt
from megalite.config.layout import unchecked_layout
from megalite.monitor.sinks.jsonl import METRICS, stream_records
from megalite.planner.cost.step_time import step_time
from megalite.planner.hardware import Accelerator, Cluster, Link
from megalite.planner.workload import TrainingWorkload
from megalite.units import plural

LEAST_STEPS = 5  # after warm-up
LOWEST, HIGHEST = 1e-3, 10.0  # a CPU may exceed its own measurement
GRID = 64  # points of the search before golden sections
ONE_SIDED = 0.02  # relative error that all runs share, above which a fit is refused
PRODUCTS = "matrix products"


@dataclass(frozen=True)
class MeasuredRun:
    """A finished run on one kind of accelerator."""

    folder: Path
    accelerator: str
    whole: Accelerator  # as it was in the catalogue when the run began
    link: Link  # between ranks of a host
    cluster: Cluster
    job: TrainingWorkload
    steps: int
    measured_s: float

    def predicted_s(self, efficiency: float) -> float:
        """The predicted time of a step with this constant."""
        return step_time(self.job, self.cluster.with_figures(efficiency=efficiency)).seconds

    def in_products(self, efficiency: float) -> float:
        """The share of a step that the constant determines."""
        step = step_time(self.job, self.cluster.with_figures(efficiency=efficiency))
        return step.parts.get(PRODUCTS, 0.0) / step.seconds


@dataclass(frozen=True)
class Fit:
    """The fitted constant of an accelerator, and the runs that it was fitted on."""

    accelerator: str
    efficiency: float
    runs: tuple[MeasuredRun, ...]

    @property
    def in_products(self) -> float:
        """The mean share of a step that the constant determines, predicted with the constant before the fit: the new
        one absorbs whatever else is slow."""
        return statistics.mean(run.in_products(run.whole.efficiency) for run in self.runs)


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False, strict=False)


class _Predicted(_Lenient):
    accelerator: str = Field(min_length=1)
    whole_accelerator: Accelerator
    link: Link
    cluster: Cluster


class _Measured(_Lenient):
    steps: int = 0
    step_time_s: float | None = Field(default=None, gt=0)


class _Layout(_Lenient):
    tensor_parallel_size: PositiveInt
    pipeline_parallel_size: PositiveInt
    data_parallel_size: PositiveInt
    context_parallel_size: PositiveInt = 1


class _Receipt(_Lenient):
    layout: _Layout
    prediction: _Predicted
    measured: _Measured = _Measured()
    resumed_from_step: int = 0


def read_run(path: Path) -> MeasuredRun:
    """Reads the receipt and the config of a run folder. Raises LaunchError where they lack what a fit needs."""
    folder = path.parent if path.name == "receipt.json" else path
    values = _json_of(folder / "receipt.json")
    problem = values.get("prediction", {}).get("problem") if isinstance(values.get("prediction"), dict) else None
    if not isinstance(values.get("prediction"), dict):
        raise LaunchError(f"{folder}: its receipt has no prediction: train it again with this version")
    if problem and "cluster" not in values["prediction"]:
        reason = " ".join(str(problem).split())
        raise LaunchError(f"{folder}: no step time was predicted for it, because {reason}")
    try:
        receipt = _Receipt.model_validate(values)
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors(include_url=False)[0]["loc"])
        raise LaunchError(f"{folder}/receipt.json: {place} is not as this version of megalite writes it") from None
    predicted, sizes = receipt.prediction, receipt.layout
    try:
        config = load_saved_config(folder / "config.yaml")
        world_size = sizes.tensor_parallel_size * sizes.pipeline_parallel_size * sizes.data_parallel_size
        world_size *= sizes.context_parallel_size
        last = config.batches.shape_after(max(0, config.total_steps - 1))  # receipts tell of the last stage
        job = TrainingWorkload.of(config, unchecked_layout(config, world_size), last)
        steps, measured_s = _measured(folder, receipt)
        run = MeasuredRun(
            folder,
            predicted.accelerator,
            predicted.whole_accelerator,
            predicted.link,
            predicted.cluster,
            job,
            steps,
            measured_s,
        )
        run.predicted_s(predicted.whole_accelerator.efficiency)
    except ConfigError as error:
        raise LaunchError(f"{folder}: {error}") from None
    except (ArithmeticError, LookupError, ValueError) as error:
        if isinstance(error, LaunchError):
            raise
        raise LaunchError(f"{folder}: no step time can be predicted from the figures of its receipt") from None
    return run


def fit(runs: Sequence[MeasuredRun]) -> list[Fit]:
    """Fits each kind of accelerator. Raises LaunchError where no efficiency explains the times."""
    kinds: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        kinds.setdefault(run.accelerator, []).append(run)
    return [Fit(name, _fitted(name, own), tuple(own)) for name, own in kinds.items()]


def _fitted(name: str, runs: Sequence[MeasuredRun]) -> float:
    def squares(logarithm: float) -> float:
        efficiency = math.exp(logarithm)
        return sum(math.log(run.predicted_s(efficiency) / run.measured_s) ** 2 for run in runs)

    try:
        efficiency = math.exp(minimize(squares, math.log(LOWEST), math.log(HIGHEST)))
        errors = [run.predicted_s(efficiency) / run.measured_s - 1 for run in runs]
    except (ArithmeticError, ValueError):
        errors = [math.nan]
    if not all(map(math.isfinite, errors)):
        raise LaunchError(
            f"the step times of {name} cannot be compared with what is predicted, which is not finite: is something in "
            f"{runs[0].folder}/receipt.json far out of the usual?"
        )
    if min(errors) > ONE_SIDED or max(errors) < -ONE_SIDED:  # a least-squares fit has errors of both signs, or none
        than = "shorter" if min(errors) > 0 else "longer"
        raise LaunchError(
            f"no efficiency of {name} explains these step times, which are {than} than any predicts: was the machine "
            "busy with something else, or is its entry in the catalogue wrong?"
        )
    return float(f"{efficiency:.4g}")


def minimize(function: Callable[[float], float], low: float, high: float) -> float:
    """Minimises a function of one variable: the best point of a grid, then golden sections around it."""
    step = (high - low) / (GRID - 1)
    grid = [low + number * step for number in range(GRID)]
    best = min(grid, key=function)
    left, right = max(low, best - step), min(high, best + step)
    ratio = (math.sqrt(5) - 1) / 2
    while right - left > 1e-6:
        inner, outer = right - ratio * (right - left), left + ratio * (right - left)
        left, right = (left, outer) if function(inner) < function(outer) else (inner, right)
    return (left + right) / 2


def _measured(folder: Path, receipt: _Receipt) -> tuple[int, float]:
    """The number of steps and their median time: from the receipt or, if the run was killed, from metrics.jsonl."""
    measured = receipt.measured
    if measured.step_time_s is not None and measured.steps >= LEAST_STEPS:
        return measured.steps, measured.step_time_s
    records = [
        record
        for record in stream_records(folder / METRICS)
        if isinstance(record["step"], int) and record["step"] > receipt.resumed_from_step
    ]
    times = [time for one in records[WARM_UP_STEPS:] if (time := _computing_s(one)) is not None]
    if len(times) < LEAST_STEPS:
        raise LaunchError(
            f"{folder}: it has {plural(len(times), 'step')} after {WARM_UP_STEPS} of warm-up, and "
            f"{LEAST_STEPS} are needed: train {LEAST_STEPS + WARM_UP_STEPS} or more"
        )
    return len(times), statistics.median(times)


def _computing_s(record: dict[str, Any]) -> float | None:
    whole, waited = record.get("step_time_s"), record.get("data_wait_s", 0.0)
    if not isinstance(whole, int | float) or not isinstance(waited, int | float):
        return None
    try:
        computing = float(whole) - float(waited)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return computing if 0 < computing < math.inf else None


def _json_of(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise LaunchError(f"{path.parent}: it has no receipt.json: name the folder of a run (its run_dir)") from None
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise LaunchError(f"{path} is not JSON, or was cut off: train the run again") from None
    if not isinstance(values, dict):
        raise LaunchError(f"{path} is no receipt of a run")
    return values
