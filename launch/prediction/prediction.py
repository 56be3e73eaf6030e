"""The predicted and the measured memory and step time of a run, for its console and its receipt. No torch here.

A `Prediction` is made before the first step; a `SessionMeasurement` collects the record of each step and, at the end,
the peak memory of every rank.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.prediction.this_machine import Machine
from megalite.config import Config, ResolvedLayout
from megalite.config.sections import PrecisionConfig
from megalite.monitor.records.step import StepRecord
from megalite.parallel.mesh import Mesh
from megalite.planner.cost.memory import TENSORS, Device, StageMemory, memory_of, with_process
from megalite.planner.cost.step_time import StepTime, step_time
from megalite.planner.published_speed import beside_published
from megalite.planner.workload import TrainingWorkload
from megalite.units import about, gib, of_stages, seconds

WARM_UP_STEPS = 3  # of a session, in which threads start, caches fill and memory is mapped
KEPT_STEPS = 10_000
LEAST_WAIT = 0.01  # part of a step that waiting for data takes before it is worth telling
Facts = dict[str, Any]


@dataclass(frozen=True)
class Prediction:
    """The prediction for one session of a run."""

    job: TrainingWorkload
    machine: Machine | None  # None: `problem` says why
    problem: str
    memory: tuple[StageMemory, ...]  # per stage: of the process on a CPU, of its tensors on a GPU
    step: StepTime | None
    precision: PrecisionConfig  # of the run: `job` has no float8

    @classmethod
    def of(
        cls,
        config: Config,
        layout: ResolvedLayout,
        machine: Machine | None,
        problem: str = "",
        process_bytes: int = 0,
        device: Device = TENSORS,
    ) -> Prediction:
        """Predicts the memory of the largest batch of the run, and where `machine` is known the time of a step, with
        the batch that it has where `config` counts its length from.

        `process_bytes` is the memory of a rank's process before its model was built, or 0 where only tensors count, as
        on a GPU, where `torch.cuda.max_memory_allocated` is measured.
        """
        job, batches = TrainingWorkload.of(config, layout), config.batches
        step = None
        if machine is not None:
            try:
                next_steps = TrainingWorkload.of(config, layout, batches.shape_after(batches.step))
                step = step_time(next_steps, machine.cluster)
            except Exception as error:  # the memory can be predicted all the same
                problem = f"{type(error).__name__}: {error}".rstrip(": ")
        memory = memory_of(job, device)
        if process_bytes:
            memory = tuple(with_process(stage, job, process_bytes) for stage in memory)
        return cls(job, machine, problem, memory, step, config.precision)

    @property
    def why_rough(self) -> str | None:
        """Why the step time is rough, as `Machine.why_rough` tells; None where it is not."""
        return (self.machine.why_rough or None) if self.machine is not None else None

    def sentences(self) -> list[str]:
        """The prediction as sentences, printed before the first step."""
        sentences = [f"predicted: peak memory {of_stages([gib(stage.total) for stage in self.memory])}"]
        if self.step is None or self.machine is None:
            return [*sentences, f"predicted: no step time, because {self.problem}"]
        parts = sorted(self.step.parts.items(), key=lambda part: -part[1])
        shares = ", ".join(f"{name} {s / self.step.seconds:.0%}" for name, s in parts if s > 0.01 * self.step.seconds)
        kind, rough, utilization = self.machine.whole, self.why_rough, self.step.model_flops_utilization
        reason = rough or f"efficiency {kind.efficiency:.2f}, {kind.calibrated_on}"
        of_peak = "" if utilization is None else f", MFU {utilization:.0%}"
        took = f"{_expected(self)} a step{of_peak}"
        sentences.append(f"predicted: {took} on {self.machine.name} ({reason}): {shares}")
        beside = self.beside_published()
        return sentences if beside is None else [*sentences, beside]

    def model_flops_utilization(self, step_time_s: float) -> float | None:
        """Returns the MFU of a step that took `step_time_s`, by the same FLOPs and peak as the predicted one.

        None where there is no peak: on a CPU, and on a GPU that the catalogue lacks.
        """
        if self.step is None or self.step.peak_flops is None or step_time_s <= 0:
            return None
        return self.step.model_flops / (step_time_s * self.step.peak_flops)

    def beside_published(self, measured_s: float | None = None) -> str | None:
        """Returns a sentence with the model TFLOP/s of a step, measured or else predicted, and the best published.

        None where nothing is published for these accelerators, as for a CPU.
        """
        if self.step is None or self.machine is None:
            return None
        tflops = self.step.model_flops / (measured_s or self.step.seconds) / self.job.layout.world_size / 1e12
        name, kind, is_measured = self.machine.name, self.machine.whole, bool(measured_s)
        return beside_published(name, kind, self.precision, tflops, is_measured=is_measured)

    def facts(self) -> Facts:
        """The prediction for receipt.json; `megalite plan calibrate` reads it."""
        facts: Facts = {
            "problem": self.problem or None,
            "memory": [
                {
                    "stage": one.stage,
                    "peak_mib": round(one.total / 2**20, 3),
                    "parts_mib": {k: round(v / 2**20, 3) for k, v in one.parts.items()},
                }
                for one in self.memory
            ],
        }
        if self.machine is not None:
            facts |= {
                "accelerator": self.machine.name,
                "efficiency": self.machine.whole.efficiency,
                "calibrated_on": self.machine.whole.calibrated_on,
                "rough": self.why_rough,
                "whole_accelerator": self.machine.whole.model_dump(mode="json", exclude={"published"}),
                "link": self.machine.link.model_dump(mode="json"),
                "cluster": self.machine.cluster.model_dump(mode="json", exclude={"accelerator": {"published"}}),
            }
        if self.step is not None:
            facts["step_time_s"] = self.step.seconds
            facts["parts_s"] = dict(self.step.parts)
            facts["model_flops_utilization"] = self.step.model_flops_utilization
        return facts


class SessionMeasurement:
    """The step times of a session so far; keeps two numbers per step."""

    def __init__(self) -> None:
        # seconds of computing, and of waiting for data
        self._steps: deque[tuple[float, float]] = deque(maxlen=KEPT_STEPS)
        self._left_out = 0

    def add(self, record: StepRecord) -> None:
        """Adds the record of a step."""
        if self._left_out < WARM_UP_STEPS:
            self._left_out += 1
            return
        self._steps.append((record["step_time_s"] - record["data_wait_s"], record["data_wait_s"]))

    def facts(self, memory: Sequence[Mapping[str, Any] | None]) -> Facts:
        """The measurement for receipt.json. `memory`: the `memory_facts` of each rank, or none at all."""
        computing, waiting = [step[0] for step in self._steps], [step[1] for step in self._steps]
        return {
            "steps": len(self._steps),
            "warm_up_steps": self._left_out,
            "step_time_s": statistics.median(computing) if computing else None,
            "data_wait_s": statistics.median(waiting) if waiting else None,
            "ranks": [dict(one) if one is not None else None for one in memory],
        }


def comparison(prediction: Prediction, measured: Facts, mesh: Mesh) -> list[str]:
    """Compares prediction and measurement in sentences, after training; a stage counts with its fullest rank."""
    sentences = []
    if (took := measured["step_time_s"]) is not None and prediction.step is not None:
        wait, words = measured["data_wait_s"], format_rough_error if prediction.why_rough else format_error
        error = words(prediction.step.seconds, took)
        waited = f", and waited {seconds(wait)} for data" if wait > LEAST_WAIT * took else ""
        sentences.append(
            f"a step: predicted {_expected(prediction)}, measured {seconds(took)} ({error}; "
            f"median of {measured['steps']}{waited})"
        )
        if (beside := prediction.beside_published(took)) is not None:
            sentences.append(beside)
    fullest: dict[int, float] = {}
    for rank, one in enumerate(measured["ranks"]):
        if one is not None:
            stage = mesh.coordinate(rank).pipeline_rank
            fullest[stage] = max(fullest.get(stage, 0.0), one["peak_mib"] * 2**20)
    pairs = [
        f"{f'stage {one.stage} ' * (len(prediction.memory) > 1)}predicted {gib(one.total)}, measured {gib(peak)} "
        f"({format_error(one.total, peak)})"
        for one in prediction.memory
        if (peak := fullest.get(one.stage)) is not None
    ]
    return [*sentences, f"peak memory: {'; '.join(pairs)}"] if pairs else sentences


def format_error(predicted: float, measured: float) -> str:
    """The relative error of a prediction, such as `predicted 3.1 % more than measured`."""
    error = f"{abs(predicted / measured - 1):.1%}".replace("%", " %")
    return f"predicted {error} {'more' if predicted > measured else 'less'} than measured"


def format_rough_error(predicted_s: float, measured_s: float) -> str:
    """The error of a guess, such as `predicted 20 times as long as measured`."""
    for longer_s, shorter_s, words in (
        (predicted_s, measured_s, "predicted {} times as long as measured"),
        (measured_s, predicted_s, "measured {} times as long as predicted"),
    ):
        if longer_s >= 2 * shorter_s:
            return words.format(f"{float(f'{longer_s / shorter_s:.1g}'):,g}")
    return "within a factor of 2"


def _expected(prediction: Prediction) -> str:
    """The predicted step time: with one digit where it is rough."""
    assert prediction.step is not None
    time_s = prediction.step.seconds
    return f"roughly {about(time_s)}" if prediction.why_rough else seconds(time_s)
