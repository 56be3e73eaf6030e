"""A run's own prediction: what its ranks are asked for it, and what rank 0 makes of the answers. No torch at import.

Nothing here ends a run: what cannot be predicted is said in one sentence.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import psutil

from launch.devices import Device
from launch.plan.prediction import Measurement, Prediction, comparison
from launch.plan.this_machine import Care, Machine, describe_machine, has_bf16_units, start_patience_s
from launch.rank_environment import Rank
from megalite.config import Config, ResolvedLayout
from megalite.parallel.mesh import Mesh
from megalite.planner import memory

if TYPE_CHECKING:
    from megalite.engine.engine import Engine

# ranks of this host, or of the first, as torchrun, DeepSpeed, Open MPI, MPICH and Slurm tell them
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
PRINTED_AFTER_S = 5.0  # at most: the first step waits for it
RankMemory = dict[str, float]  # MiB


class Look:
    """A look at this machine, beside what else a rank does: a CPU may have to be measured, and nobody waits for it."""

    def __init__(self, look: Callable[[], Machine]) -> None:
        self._found: tuple[Machine | None, str] = None, "this machine is still being measured"
        self._thread = threading.Thread(target=self._run, args=(look,), name="look at this machine", daemon=True)
        self._thread.start()

    def found(self, at_most_s: float) -> tuple[Machine | None, str]:
        """The machine, or why there is none."""
        self._thread.join(at_most_s)
        return self._found

    def _run(self, look: Callable[[], Machine]) -> None:
        try:
            self._found = look(), ""
        except Exception as error:  # of whatever kind: the run does not need it
            self._found = None, str(error) or type(error).__name__


@dataclass(frozen=True)
class Surroundings:
    """What a rank knows before its model is built."""

    look: Look | None = None  # rank 0 alone looks
    process_bytes: int = 0  # of this rank's process; 0 on a GPU, where tensors alone are measured
    device: memory.Device = memory.TENSORS  # what allocates its tensors

    @classmethod
    def of(cls, rank: Rank, device: Device) -> Surroundings:
        """Rank 0 begins to look at its machine."""
        process_bytes = _own_bytes() if device == "cpu" else 0
        if rank.rank != 0:
            return cls(process_bytes=process_bytes)
        where = cpu_memory(os.environ) if device == "cpu" else memory.TENSORS
        return cls(Look(lambda: _machine_of(rank, device)), process_bytes, where)


class OwnRun:
    """Rank 0's account of one session, and each rank's own memory."""

    def __init__(self, config: Config, layout: ResolvedLayout, surroundings: Surroundings) -> None:
        self._config, self._layout, self._surroundings = config, layout, surroundings
        self._prediction: Prediction | None = None
        self._measurement = Measurement()
        self._ranks: Sequence[RankMemory | None] = []

    def predict(self) -> None:
        """Rank 0, before the first step; may raise."""
        around = self._surroundings
        patience_s = min(PRINTED_AFTER_S, start_patience_s(self._config))
        machine, problem = around.look.found(patience_s) if around.look is not None else (None, "nobody has looked")
        self._prediction = Prediction.of(
            self._config, self._layout, machine, problem, around.process_bytes, around.device
        )

    def predicted(self) -> list[str]:
        """For the console."""
        return self._prediction.sentences() if self._prediction is not None else []

    def step(self, record: Mapping[str, Any]) -> None:
        """Rank 0, after each step."""
        self._measurement.add(record)

    def memory(self) -> RankMemory | None:
        """Of this rank; None where it cannot be told."""
        from megalite.monitor.memory import peak_memory_mib

        try:
            return {
                "peak_mib": round(peak_memory_mib(), 3),
                "process_mib": round(self._surroundings.process_bytes / 2**20, 3),
            }
        except Exception:  # a driver that fails at the end: the others must not wait for this rank
            return None

    def ended(self, ranks: Sequence[RankMemory | None]) -> list[str]:
        """Rank 0, with each rank's `memory`; for the console."""
        self._ranks = ranks
        if self._prediction is None:
            return []
        return comparison(self._prediction, self._measurement.facts(ranks), Mesh.of(self._layout))

    def facts(self) -> dict[str, Any]:
        """For receipt.json."""
        return {
            "prediction": self._prediction.facts() if self._prediction is not None else None,
            "measured": self._measurement.facts(self._ranks),
        }


def _machine_of(rank: Rank, device: Device) -> Machine:
    local = ranks_of_a_host(rank, os.environ)
    nodes = -(-rank.world_size // local)
    return describe_machine(local, on_cpu=device == "cpu", nodes=nodes, care=Care(beside=local))


def _own_bytes() -> int:
    """Resident in this process, with all that building an engine would import."""
    import megalite.engine.imports  # noqa: F401

    return int(psutil.Process().memory_info().rss)


def memory_of_ranks(engine: Engine, own: RankMemory | None) -> list[RankMemory | None]:
    """Every rank's; collective, where a session ends that all ranks end alike."""
    from megalite.engine.activity import Operation
    from megalite.engine.distributed import from_all_ranks

    engine.activity.note(Operation.MEET, peers=engine.activity.peers.everyone)
    return from_all_ranks(own)


def ranks_of_a_host(rank: Rank, environment: Mapping[str, str]) -> int:
    """How many there are; where nobody tells, all are taken to be on this one."""
    if not rank.has_several_hosts:
        return rank.world_size
    told = next((found for name in LOCAL_SIZES if (found := LOCAL_SIZE.fullmatch(environment.get(name, "")))), None)
    return min(max(1, int(told[1])), rank.world_size) if told is not None else rank.world_size


def cpu_memory(environment: Mapping[str, str]) -> memory.Device:
    """What allocates this rank's tensors: glibc as launch/local.py sets it, or as it comes."""
    is_ours = "mmap_threshold" in environment.get("GLIBC_TUNABLES", "")
    return replace(memory.CPU, keeps_freed=is_ours, widens_bf16=not has_bf16_units())
