"""Sums up where the time of the steps since the last entry of `steps.jsonl` went, over all ranks. No torch.

Each rank sends one row of numbers to rank 0; its columns are `ROW`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megalite.monitor.records.step import StepRecord
from megalite.monitor.steps.parts import OF_COPIES, OWN_WORK, PARTS, communication_share

KINDS = (
    *(("tensor", operation) for operation in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")),
    *(("context", operation) for operation in ("all_gather", "reduce_scatter", "all_to_all")),
    ("expert", "all_to_all"),
    *(("pipeline", operation) for operation in ("send", "receive", "broadcast")),
    *(
        (axis, operation)
        for axis in OF_COPIES
        for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce")
    ),
    *(("tied", operation) for operation in ("send", "receive", "broadcast")),
    *(("all", operation) for operation in ("all_reduce", "all_gather", "broadcast", "barrier")),
    ("all", "other"),
)
"""The communication that is told apart: axis and operation. What is none of these is the last one."""

POSITION = {kind: index for index, kind in enumerate(KINDS)}
HEAD = ("steps", "wall_s", "met", "began", "ended", "busy_s", "memory_peak_mib")
ROW = (*HEAD, *PARTS, *(f"{axis} {name} {what}" for axis, name in KINDS for what in ("calls", "bytes", "seconds")))
"""Columns: number of steps; their seconds; when the rank left its last meeting, began its first pass of the last step
and ended its last one, on its own clock; seconds of these passes; its peak memory so far; seconds of all steps by part;
communication of all steps."""

COLUMN = {name: index for index, name in enumerate(ROW)}


@dataclass(frozen=True)
class Communication:
    """One kind of communication of one rank in a training step, on average."""

    axis: str
    operation: str
    calls: float
    bytes: float
    seconds: float  # that the rank was held up by it


@dataclass(frozen=True)
class StageBreakdown:
    """The ranks of one pipeline stage."""

    stage: int
    mean_s: Mapping[str, float]  # by part
    max_s: Mapping[str, float]
    idle_ratio: float | None  # of the last step's pipeline, over stages from first to last pass; None without stages
    slowest_rank: int  # with the most own work
    communication: tuple[Communication, ...]  # of the stage's first rank


@dataclass(frozen=True)
class StepBreakdown:
    """Seconds are per step, the mean over `steps` steps."""

    step: int  # the last one
    steps: int
    wall_s: float  # mean over ranks
    parts_s: Mapping[str, float]  # mean over ranks
    stages: tuple[StageBreakdown, ...]
    own_s: Mapping[str, Sequence[float]]  # by part of OWN_WORK and rank, of all these steps together
    stage_of_ranks: Sequence[int]  # each of these has an entry for each rank
    host_of_ranks: Sequence[str]
    memory_peak_mib: Sequence[float]  # so far

    @classmethod
    def of(
        cls, step: int, rows: np.ndarray, stages: Sequence[int], clocks: Sequence[float], hosts: Sequence[str] = ()
    ) -> StepBreakdown:
        """Builds it from the `rows` [ranks, len(ROW)] of all ranks, the stage of each, by how much its clock is ahead
        of rank 0's, and its host, where that is known."""
        counts = np.maximum(1, rows[:, COLUMN["steps"]])  # a rank that failed to record a step has fewer
        parts = rows[:, COLUMN["data"] : COLUMN["other"] + 1] / counts[:, None]
        where, ahead = np.asarray(stages), np.asarray(clocks)
        idle = _idle(rows, ahead) if len(set(stages)) > 1 else None
        of_stages = []
        for stage in sorted(set(stages)):
            ranks = np.flatnonzero(where == stage)
            own = sum(rows[ranks, COLUMN[part]] for part in OWN_WORK)
            of_stages.append(
                StageBreakdown(
                    stage,
                    _by_part(parts[ranks].mean(axis=0)),
                    _by_part(parts[ranks].max(axis=0)),
                    None if idle is None else float(idle[ranks].mean()),
                    int(ranks[np.argmax(own)]),
                    _communication(rows[ranks[0]] / counts[ranks[0]]),
                )
            )
        return cls(
            step,
            int(counts.max()),
            float((rows[:, COLUMN["wall_s"]] / counts).mean()),
            _by_part(parts.mean(axis=0)),
            tuple(of_stages),
            {part: rows[:, COLUMN[part]].tolist() for part in OWN_WORK},
            stages,
            hosts or [""] * len(stages),
            rows[:, COLUMN["memory_peak_mib"]].tolist(),
        )

    def record(self) -> StepRecord:
        """Returns what it adds to the record of its step in metrics.jsonl."""
        return {
            "wall_s": round(self.wall_s, 9),
            "parts_s": {name: round(value, 9) for name, value in self.parts_s.items()},
            "communication_share": round(communication_share(dict(self.parts_s)), 6),
        }

    def line(self) -> dict[str, Any]:
        """Returns its entry in steps.jsonl."""
        stages = [
            vars(stage)
            | {
                "mean_s": _rounded(stage.mean_s),
                "max_s": _rounded(stage.max_s),
                "idle_ratio": None if stage.idle_ratio is None else round(stage.idle_ratio, 6),
                "communication": [vars(one) | {"seconds": round(one.seconds, 6)} for one in stage.communication],
            }
            for stage in self.stages
        ]
        return {"step": self.step, "steps": self.steps, "wall_s": round(self.wall_s, 6), "stages": stages}


def _by_part(values: np.ndarray) -> dict[str, float]:
    return dict(zip(PARTS, values.tolist(), strict=True))


def _rounded(seconds: Mapping[str, float]) -> dict[str, float]:
    """Returns the parts that took any time, to the microsecond."""
    return {name: short for name, value in seconds.items() if (short := round(value, 6))}


def _communication(row: np.ndarray) -> tuple[Communication, ...]:
    first = COLUMN[f"{KINDS[0][0]} {KINDS[0][1]} calls"]
    table = row[first:].reshape(len(KINDS), 3).tolist()
    return tuple(Communication(*kind, *numbers) for kind, numbers in zip(KINDS, table, strict=True) if numbers[0])


def _idle(rows: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Returns the idle share of each rank: of the time from the first pass of any rank to the last one's end."""
    began, ended = rows[:, COLUMN["began"]] - ahead, rows[:, COLUMN["ended"]] - ahead
    makespan = ended.max() - began.min()
    return np.clip(1 - rows[:, COLUMN["busy_s"]] / makespan, 0.0, 1.0) if makespan > 0 else np.zeros(len(rows))
