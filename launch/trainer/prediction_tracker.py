"""Predicts a run's memory and step time, and compares them with the measurement at its end.

The first step does not wait for a CPU that nobody has measured yet: its step time is told when it is known, or at the
end of a run that is done before.

Nothing here ends a run: what cannot be predicted is reported in one sentence. No torch at import.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from launch.prediction.prediction import Prediction, SessionMeasurement, comparison
from launch.prediction.this_machine import Machine, MeasurementLimits, cpu_memory, describe_machine, mark_contradicted
from launch.runtime.devices import Device
from launch.runtime.logs import get_logger
from launch.runtime.rank_environment import Rank
from megalite.config import Config, ResolvedLayout
from megalite.monitor.observer import Observer
from megalite.monitor.records.step import StepRecord
from megalite.parallel.mesh import Mesh
from megalite.planner.cost import memory
from megalite.planner.cost.stage_parameters import recompute_of_blocks
from megalite.planner.hardware import is_guess

if TYPE_CHECKING:
    from megalite.engine.engine import Engine

log = get_logger(__name__)

# variables with the number of ranks of this host, or of the first: torchrun, DeepSpeed, Open MPI, MPICH and Slurm
LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_TASKS_PER_NODE",
    "SLURM_NTASKS_PER_NODE",
)
LOCAL_SIZE = re.compile(r"(\d+)(\(x\d+\))?(,[\d,x()]+)?")  # Slurm has 8(x2),4 for hosts with 8, 8 and 4
PRINTED_AFTER_S = 0.25  # longest wait for the machine's description before the first step, which it delays
MEASURED_AT_END_S = 5.0  # longest wait for it when a run of few steps is done
RankMemory = dict[str, float]  # MiB


class MachineLookup:
    """Describes this machine in a thread: a CPU may have to be measured, and the start of the run must not wait."""

    def __init__(self, describe: Callable[[], Machine]) -> None:
        self._found: tuple[Machine | None, str] = None, "this machine is still being measured"
        self._thread = threading.Thread(target=self._run, args=(describe,), name="machine lookup", daemon=True)
        self._thread.start()

    def found(self, at_most_s: float) -> tuple[Machine | None, str]:
        """Returns the machine, or None and why it is not known."""
        self._thread.join(at_most_s)
        return self._found

    @property
    def is_done(self) -> bool:
        """True once `found` returns the same for good."""
        return not self._thread.is_alive()

    def _run(self, describe: Callable[[], Machine]) -> None:
        try:
            self._found = describe(), ""
        except Exception as error:  # of whatever kind: the run does not need it
            self._found = None, str(error) or type(error).__name__


class PredictionTracker(Observer):
    """Predicts a session on rank 0 and measures it; on other ranks only `memory` is used."""

    name = "the prediction"

    def __init__(
        self, config: Config, layout: ResolvedLayout, rank: Rank, device: Device, lookup: MachineLookup | None = None
    ) -> None:
        """Measures this process before its model is built; rank 0 starts to describe its machine.

        `lookup` is the description that rank 0 has already started.
        """
        self._config, self._layout = config, layout
        self.prediction: Prediction | None = None  # made at the start, on rank 0
        self._measurement = SessionMeasurement()
        self._ranks: Sequence[RankMemory | None] = []
        self.process_bytes = 0  # resident memory of this rank; 0 on a GPU, where tensors alone are measured
        self.allocator = memory.TENSORS  # of its tensors
        self.lookup = lookup
        self._is_pending = False  # the machine is still being measured and the run has begun
        if device == "cpu":
            import megalite.engine.deepspeed.preload  # noqa: F401 - so that what building an engine imports is counted

            if layout.zero_stage == 3 or any(mode != "none" for mode in recompute_of_blocks(config, layout)):
                import torch._dynamo  # noqa: F401 - by the first step

            self.process_bytes = int(psutil.Process().memory_info().rss)
        if rank.rank == 0:
            if device == "cpu":
                self.allocator = cpu_memory(os.environ)
            self.lookup = lookup or look_up_machine(rank, on_cpu=device == "cpu")

    def count_from(self, config: Config) -> None:
        """Takes the config that counts its length from where the session starts."""
        self._config = config

    def on_start(self) -> None:
        """Predicts, and logs the prediction; the step time follows if the machine is still being measured."""
        for sentence in self._predict(PRINTED_AFTER_S).sentences():
            log.info(sentence)
        self._is_pending = self.lookup is not None and not self.lookup.is_done

    def _predict(self, at_most_s: float) -> Prediction:
        machine, problem = None, "this machine has not been examined"
        if self.lookup is not None:
            machine, problem = self.lookup.found(at_most_s)
        found = Prediction.of(self._config, self._layout, machine, problem, self.process_bytes, self.allocator)
        self.prediction = found
        return found

    def _predict_again(self, at_most_s: float) -> None:
        """Logs the step time that the run's start could not tell, if the machine has been measured by now."""
        if self.lookup is not None and self._is_pending:
            prediction = self._predict(at_most_s)
            if self.lookup.is_done:
                self._is_pending = False
                for sentence in prediction.sentences()[1:]:  # behind the one about memory, which was said
                    log.info(sentence)

    def measure(self, record: StepRecord) -> StepRecord:
        """Returns `model_flops_utilization`, where the peak of the devices is known."""
        self._follow_stages(record)
        if self.lookup is not None and self.lookup.is_done:
            self._predict_again(0.0)
        self._measurement.add(record)
        used = None
        if self.prediction is not None:
            used = self.prediction.model_flops_utilization(record["step_time_s"])
        return {} if used is None else {"model_flops_utilization": round(used, 4)}

    def _follow_stages(self, record: StepRecord) -> None:
        """Predicts and measures anew where a stage of training has begun with this step."""
        if self.prediction is None or not self._config.training.stages:
            return
        batches, (sequences, length) = self._config.batches, (record["global_batch_size"], record["sequence_length"])
        shape = batches.stretches[0].shape  # a stage may have other micro-batches alone
        is_same = batches.shape_after(record["step"] - 1) == shape
        if is_same and (sequences, length) == (shape.global_batch_size, shape.sequence_length):
            return
        self._config = self._config.counted_from(record["step"] - 1, record["tokens_seen"] - sequences * length)
        self._measurement = SessionMeasurement()
        self._predict(0.0)

    def on_end(self, ending: str, *, save_blocked_s: float = 0.0) -> None:
        """Predicts a run that ended before its machine was measured; only one that is done waits for that."""
        self._predict_again(MEASURED_AT_END_S if ending == "ended" else 0.0)

    def memory(self) -> RankMemory | None:
        """Returns the peak memory of this rank and what its process had before its model was built.

        None if it cannot be measured.
        """
        from megalite.monitor.memory import peak_memory_mib

        try:
            return {"peak_mib": round(peak_memory_mib(), 3), "process_mib": round(self.process_bytes / 2**20, 3)}
        except Exception:  # a driver that fails at the end: the others must not wait for this rank
            return None

    def log_comparison(self, ranks: Sequence[RankMemory | None]) -> None:
        """Logs the prediction beside the measurement; `ranks` is the `memory` of each rank."""
        self._ranks = ranks
        prediction, measured = self.prediction, self._measurement.facts(ranks)
        if prediction is None:
            return
        for sentence in comparison(prediction, measured, Mesh.of(self._layout)):
            log.info(sentence)
        machine, took_s = prediction.machine, measured["step_time_s"]
        if machine is None or not machine.is_cpu or prediction.step is None or took_s is None:
            return
        if is_guess(machine.whole) and mark_contradicted(machine.name, prediction.step.seconds, took_s):
            log.info(
                f"{machine.name} is measured again before the next run, because these steps contradict its figures"
            )

    def facts(self) -> dict[str, Any]:
        """Returns the prediction and the measurement for receipt.json."""
        prediction, measured = self.prediction, self._measurement.facts(self._ranks)
        return {
            "prediction": prediction.facts() if prediction is not None else None,
            "measured": measured,
            "published": prediction.beside_published(measured["step_time_s"]) if prediction is not None else None,
        }


def look_up_machine(rank: Rank, *, on_cpu: bool) -> MachineLookup:
    """Starts to describe the machine of `rank`, rank 0, and measures its CPU if nobody has done it yet."""
    local = ranks_of_a_host(rank, os.environ)
    nodes, limits = -(-rank.world_size // local), MeasurementLimits(busy_ranks=local)
    return MachineLookup(lambda: describe_machine(local, on_cpu=on_cpu, nodes=nodes, limits=limits))


def memory_of_ranks(engine: Engine, own: RankMemory | None) -> list[RankMemory | None]:
    """Gathers `PredictionTracker.memory` of all ranks; collective, at the end of a session that all ranks reach."""
    from megalite.distributed.agreement import from_all_ranks
    from megalite.tracing.activity import Operation

    engine.activity.record_op(Operation.MEET, peers=engine.activity.peers.everyone)
    return from_all_ranks(own, RankMemory | None)


def ranks_of_a_host(rank: Rank, environment: Mapping[str, str]) -> int:
    """Returns the number of ranks of one host; all of them if no launcher has set it."""
    if not rank.has_several_hosts:
        return rank.world_size
    match = next((found for name in LOCAL_SIZES if (found := LOCAL_SIZE.fullmatch(environment.get(name, "")))), None)
    return min(max(1, int(match[1])), rank.world_size) if match is not None else rank.world_size
