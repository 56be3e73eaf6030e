"""The layout to take among those that fit: the fastest that rests on nothing doubtful, and the simplest of equals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

from megalite.planner.cost.memory import StageMemory
from megalite.planner.cost.step_time import StepTime
from megalite.planner.workload import ParallelLayout, Recompute
from megalite.units import seconds

ERROR = 0.037  # of a step: the mean error on published tables (docs/planner.md), within which no order is certain
ROOMY = 0.94  # of an accelerator's memory: predictions of memory are good to some 6 %
NOTICEABLE = 0.02  # of a step, above which hidden exchanges are worth telling
RECOMPUTE_MODES: tuple[Recompute, ...] = ("none", "selective", "full")  # the fastest first


class Predicted(Protocol):
    """The facts that the choice needs of a layout that fits."""

    @property
    def layout(self) -> ParallelLayout: ...

    @property
    def time(self) -> StepTime: ...

    @property
    def fullest(self) -> StageMemory: ...


Fitting = TypeVar("Fitting", bound=Predicted)


def hidden_by_zero_3_s(candidate: Predicted) -> float:
    """Returns the seconds of exchanges that ZeRO-3 is taken to hide, which DeepSpeed does not always manage."""
    return candidate.time.hidden_s if candidate.layout.zero_stage == 3 else 0.0


def doubts(candidate: Predicted, memory_bytes: float) -> list[str]:
    """Returns in a few words what a prediction rests on that may not hold."""
    found, hidden_s = [], hidden_by_zero_3_s(candidate)
    if candidate.fullest.total > ROOMY * memory_bytes:
        found.append(f"memory {candidate.fullest.total / memory_bytes:.0%} full")
    if hidden_s > NOTICEABLE * candidate.time.seconds:
        found.append(f"ZeRO-3 hides {seconds(hidden_s)}")
    return found


def first_choice(found: Sequence[Fitting], memory_bytes: float) -> Fitting:
    """Returns the layout to take: of those with memory to spare, if there are any, the one that is fastest even if
    ZeRO-3 hides nothing; and of those that are as fast within the error of predictions, the simplest."""
    roomy = [one for one in found if one.fullest.total <= ROOMY * memory_bytes] or found
    sure_s = {id(one): one.time.seconds + hidden_by_zero_3_s(one) for one in roomy}
    alike = [one for one in roomy if sure_s[id(one)] <= (1 + ERROR) * min(sure_s.values())]
    return min(alike, key=lambda one: (*_parts(one.layout), float(f"{sure_s[id(one)]:.6g}"), *simplicity(one.layout)))


def simplicity(layout: ParallelLayout) -> tuple[Any, ...]:
    """Returns a key by which the simpler of two layouts comes first."""
    return (
        layout.tensor_parallel_size,
        layout.pipeline_parallel_size,
        _recomputed(layout),
        layout.zero_stage,
        layout.expert_parallel_size,
        layout.sequence_parallel,
        layout.micro_batch_size,
    )


def _parts(layout: ParallelLayout) -> tuple[Any, ...]:
    """Returns what makes a layout hard to understand, so that some seconds are worth doing without: sizes beside the
    replicas, the ZeRO stage, and recomputation."""
    sizes = layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.expert_parallel_size
    axes = sum(size > 1 for size in sizes)
    return axes, layout.zero_stage, _recomputed(layout)[0]


def _recomputed(layout: ParallelLayout) -> list[int]:
    """Returns the modes of the stages as numbers, the largest first."""
    modes = (layout.recompute,) if isinstance(layout.recompute, str) else layout.recompute
    return sorted(map(RECOMPUTE_MODES.index, modes), reverse=True)
