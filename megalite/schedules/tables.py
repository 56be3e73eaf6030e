"""The passes of every pipeline stage in one optimizer step, in order.

A model is cut into `stages * chunks` pieces, numbered by their *position* in it; each stage holds `chunks` of them. The
engine runs these tables and the simulation times them, so that what is drawn is what runs. No torch.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import lru_cache

from megalite.config import ConfigError
from megalite.config.rules.pipeline import FOLDED, problems_with_schedule
from megalite.schedules.dualpipev import dualpipev
from megalite.schedules.passes import PassKind, Task
from megalite.schedules.zb_v import zb_v


class Schedule(enum.StrEnum):
    """Order of the passes on every stage."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    ZB_V = "zb-v"
    DUALPIPE_V = "dualpipev"


def position_of(schedule: Schedule, stages: int, stage: int, chunk: int) -> int:
    """Returns where in the model the `chunk` of a stage is; all stages hold equally many."""
    if schedule in FOLDED and chunk == 1:
        return 2 * stages - 1 - stage
    return chunk * stages + stage


@lru_cache(maxsize=1024)
def placement(schedule: Schedule, stages: int, chunks: int) -> tuple[int, ...]:
    """Returns the stage that holds each position of the model."""
    stage_at = {position_of(schedule, stages, s, chunk): s for s in range(stages) for chunk in range(chunks)}
    return tuple(stage_at[position] for position in range(stages * chunks))


def positions_by_stage(where: Sequence[int]) -> list[list[int]]:
    """Returns the positions of each stage's chunks; `where` names the stage of each position, as `placement` does."""
    return [[position for position, holder in enumerate(where) if holder == stage] for stage in range(max(where) + 1)]


def tasks_of(schedule: Schedule, stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Task]:
    """Returns the passes of one stage, in order."""
    match schedule:
        case Schedule.ONE_F_ONE_B:
            return _one_f_one_b(stages, stage, micro_batches)
        case Schedule.INTERLEAVED:
            return _interleaved(stages, stage, micro_batches, chunks)
        case Schedule.ZERO_BUBBLE:
            return _zero_bubble(stages, stage, micro_batches)
        case Schedule.ZB_V:
            return zb_v(stages, stage, micro_batches)
        case Schedule.DUALPIPE_V:
            return dualpipev(stages, stage, micro_batches)


def check_schedule(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> None:
    """Raises ConfigError for a schedule that does not exist, such as interleaving without chunks."""
    if micro_batches < 1 or chunks < 1:
        raise ConfigError(f"{micro_batches} micro-batches in {chunks} chunks: there must be at least one of each")
    for problem in problems_with_schedule(schedule.value, stages, chunks, micro_batches):
        raise ConfigError(problem)


def _one_f_one_b(stages: int, stage: int, micro_batches: int) -> list[Task]:
    """Returns forwards until the last stage sends a gradient back, then one forward and one backward in turns, then the
    backwards that are left (Narayanan 2019, PipeDream; with a flush: Narayanan 2021, section 2.2.1)."""
    forwards = [Task(PassKind.FORWARD, number) for number in range(micro_batches)]
    backwards = [Task(PassKind.BACKWARD, number) for number in range(micro_batches)]
    return _in_turns(forwards, backwards, stages - stage - 1)


def _interleaved(stages: int, stage: int, micro_batches: int, chunks: int) -> list[Task]:
    """Each stage holds `chunks` pieces of the model, which micro-batches pass in groups of `stages`: Narayanan 2021,
    section 2.2.2, in the order of Megatron-LM's `forward_backward_pipelining_with_interleaving`."""

    def tasks(kind: PassKind, chunk_order: Sequence[int]) -> list[Task]:
        groups = range(0, micro_batches, stages)
        return [Task(kind, first + i, chunk) for first in groups for chunk in chunk_order for i in range(stages)]

    forwards = tasks(PassKind.FORWARD, range(chunks))
    backwards = tasks(PassKind.BACKWARD, range(chunks)[::-1])
    return _in_turns(forwards, backwards, 2 * (stages - stage - 1) + (chunks - 1) * stages)


def _in_turns(forwards: list[Task], backwards: list[Task], ahead: int) -> list[Task]:
    """Returns `ahead` forwards, then forwards and backwards in turns, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    turns = [task for pair in zip(forwards[ahead:], backwards, strict=False) for task in pair]
    return forwards[:ahead] + turns + backwards[len(forwards) - ahead :]


def _zero_bubble(stages: int, stage: int, micro_batches: int) -> list[Task]:
    """1F1B with the gradients of weights apart from those of inputs, and later: Qi 2023 (arXiv:2401.10241), by hand as
    ZB-H1. Stage s is s weight gradients behind, so that each holds p micro-batches at most, as 1F1B's first stage."""
    tasks = []
    for task in _one_f_one_b(stages, stage, micro_batches):
        if task.kind is PassKind.FORWARD:
            tasks.append(task)
            continue
        tasks.append(Task(PassKind.INPUT_GRADIENT, task.micro_batch))
        if task.micro_batch >= stage:
            tasks.append(Task(PassKind.WEIGHT_GRADIENT, task.micro_batch - stage))
    late = range(max(0, micro_batches - stage), micro_batches)
    return tasks + [Task(PassKind.WEIGHT_GRADIENT, number) for number in late]
