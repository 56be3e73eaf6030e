"""Simulates pipeline schedules: 1F1B, interleaved 1F1B and a zero-bubble schedule, in one optimizer step.

In: the time of each stage for one micro-batch. Out: a `Timeline`, every piece of work with start and end. Each stage
does its tasks in a fixed order, one at a time; a task starts as soon as the stage is free and its input is there.
Activations and gradients travel while the stages compute: a stage waits for what it receives, not for what it sends.
No torch.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megalite.config import ConfigError


class PassKind(enum.StrEnum):
    """Kind of pass of a micro-batch through a stage."""

    FORWARD = "forward"
    BACKWARD = "backward"  # both gradients at once
    INPUT_GRADIENT = "input gradient"  # the part that the stage before waits for
    WEIGHT_GRADIENT = "weight gradient"  # the part that nobody waits for before the optimizer step


class Schedule(enum.StrEnum):
    """Order of the passes on every stage."""

    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"


class Task(NamedTuple):
    """One pass in the order of its stage."""

    kind: PassKind
    micro_batch: int
    chunk: int = 0


class ScheduledPass(NamedTuple):
    """One pass with its start and end."""

    stage: int
    start_s: float
    end_s: float
    kind: PassKind
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class PipelineTimes:
    """Times of one micro-batch, in seconds; each sequence has one entry per stage."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]  # both gradients, and what is recomputed for them
    between_stages_s: float = 0.0  # until a stage's output is where the next stage can use it
    weight_gradient_s: Sequence[float] | None = None  # the part of `backward_s` that may come later; None: half of it

    @property
    def stages(self) -> int:
        return len(self.forward_s)

    @property
    def weight_part_s(self) -> Sequence[float]:
        if self.weight_gradient_s is not None:
            return self.weight_gradient_s
        return [backward_s / 2 for backward_s in self.backward_s]

    def check(self) -> None:
        """Raises ConfigError if the times are impossible for a pipeline."""
        if not self.forward_s or len(self.forward_s) != len(self.backward_s):
            raise ConfigError(
                f"a pipeline needs a forward and a backward time for each stage: there are {len(self.forward_s)} and "
                f"{len(self.backward_s)}"
            )
        if len(self.weight_part_s) != self.stages:
            raise ConfigError(
                f"{len(self.weight_part_s)} weight gradient times for {self.stages} stages: give one each"
            )
        if min(*self.forward_s, *self.backward_s, *self.weight_part_s, self.between_stages_s) < 0:
            raise ConfigError("times of a pipeline stage are negative: give seconds, at least 0")
        if any(part > whole for part, whole in zip(self.weight_part_s, self.backward_s, strict=True)):
            raise ConfigError(
                "the weight gradient is a part of the backward pass, and cannot be longer: give at most "
                f"{1000 * min(self.backward_s):g} ms, or a longer backward pass"
            )


@dataclass(frozen=True)
class Timeline:
    """One optimizer step of a pipeline, up to the last backward pass."""

    schedule: Schedule
    stages: int
    micro_batches: int
    chunks: int
    work: tuple[ScheduledPass, ...]  # in the order of each stage, stage after stage

    @cached_property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max(work.end_s for work in self.work)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Busy seconds of each stage."""
        busy = [0.0] * self.stages
        for work in self.work:
            busy[work.stage] += work.end_s - work.start_s
        return tuple(busy)

    @property
    def bubble_fraction(self) -> float:
        """Idle time of stages over their working time, as Narayanan 2021, section 2.2, counts: (p - 1) / m for
        1F1B with equal stages. Where stages differ, waiting for the slowest is in it."""
        return self.stages * self.makespan_s / sum(self.busy_s) - 1

    @cached_property
    def peak_in_flight(self) -> tuple[int, ...]:
        """Most micro-batches whose activations each stage holds; those of one chunk count as one."""
        last = PassKind.WEIGHT_GRADIENT if self.schedule is Schedule.ZERO_BUBBLE else PassKind.BACKWARD
        peaks, held = [0] * self.stages, [0] * self.stages
        for work in self.work:
            held[work.stage] += (work.kind is PassKind.FORWARD) - (work.kind is last)
            peaks[work.stage] = max(peaks[work.stage], held[work.stage])
        return tuple(peaks)


def simulate_schedule(schedule: Schedule, times: PipelineTimes, micro_batches: int, chunks: int = 1) -> Timeline:
    """Simulates a step of `times.stages` stages. A chunk takes `1 / chunks` of its stage's time.

    Raises ConfigError for a schedule that does not exist, such as interleaving without chunks.
    """
    times.check()
    _check_schedule(schedule, times.stages, micro_batches, chunks)
    orders = [tasks_of(schedule, times.stages, stage, micro_batches, chunks) for stage in range(times.stages)]
    work = _run(orders, times, micro_batches, chunks)
    return Timeline(schedule, times.stages, micro_batches, chunks, tuple(work))


def bubble_closed_form(schedule: Schedule, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Returns idle over working time for equal stages and free communication.

    1F1B (p - 1) / m and interleaved (p - 1) / (v m): Narayanan 2021 (arXiv:2104.04473), section 2.2. Zero-bubble: the
    bubble of ZB-H1 is (p - 1)(T_F + T_B - T_W), Qi 2023 (arXiv:2401.10241); here with T_F = T_B = T_W and at least p
    micro-batches, where it is a third of 1F1B's.
    """
    bubble = (stages - 1) / micro_batches
    match schedule:
        case Schedule.ONE_F_ONE_B:
            return bubble
        case Schedule.INTERLEAVED:
            return bubble / chunks
        case Schedule.ZERO_BUBBLE:
            return bubble / 3


def tasks_of(schedule: Schedule, stages: int, stage: int, micro_batches: int, chunks: int = 1) -> list[Task]:
    """Returns the passes of one stage, in order."""
    match schedule:
        case Schedule.ONE_F_ONE_B:
            return _one_f_one_b(stages, stage, micro_batches)
        case Schedule.INTERLEAVED:
            return _interleaved(stages, stage, micro_batches, chunks)
        case Schedule.ZERO_BUBBLE:
            return _zero_bubble(stages, stage, micro_batches)


def _check_schedule(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> None:
    if micro_batches < 1 or chunks < 1:
        raise ConfigError(f"{micro_batches} micro-batches in {chunks} chunks: there must be at least one of each")
    if schedule is not Schedule.INTERLEAVED and chunks > 1:
        raise ConfigError(f"schedule {schedule} has one chunk per stage, not {chunks}: use interleaved for more")
    if schedule is Schedule.INTERLEAVED and chunks == 1:
        raise ConfigError("interleaved needs at least 2 chunks per stage: with one, use 1f1b")
    if schedule is Schedule.INTERLEAVED and micro_batches % stages:
        near = max(1, round(micro_batches / stages)) * stages
        raise ConfigError(
            f"interleaved takes micro-batches in groups of {stages}, the number of stages, and {micro_batches} is no "
            f"multiple of it: use {near}"
        )


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


class _Step(NamedTuple):
    """A task of one stage. Results are numbered; when they were ready is kept by that number."""

    task: Task
    result: int
    needs: int
    wakes: int  # the stage that may wait for the result


NOTHING = -1  # what a task needs that needs nothing from another stage
UNUSED = -2  # the result of a task that no other needs


def _steps(order: Sequence[Task], stage: int, stages: int, micro_batches: int, chunks: int) -> list[_Step]:
    """Chunk c of stage s is position c p + s of p v in the model: forwards need the position before, gradients the one
    after. What a task needs of its own stage comes earlier in its order."""
    positions = stages * chunks
    before, after = (stage - 1) % stages, (stage + 1) % stages
    steps = []
    for task in order:
        at = (task.chunk * stages + stage) * micro_batches + task.micro_batch
        if task.kind is PassKind.FORWARD:
            steps.append(_Step(task, at, at - micro_batches if at >= micro_batches else NOTHING, after))
        elif task.kind is PassKind.WEIGHT_GRADIENT:
            steps.append(_Step(task, UNUSED, NOTHING, stage))
        else:
            gradient = positions * micro_batches + at
            is_last = at >= (positions - 1) * micro_batches
            steps.append(_Step(task, gradient, NOTHING if is_last else gradient + micro_batches, before))
    return steps


def _run(
    orders: Sequence[Sequence[Task]], times: PipelineTimes, micro_batches: int, chunks: int
) -> list[ScheduledPass]:
    """Starts every task as soon as possible. A stage waits for its input until the sender is done."""
    stages = len(orders)
    plan = [_steps(order, stage, stages, micro_batches, chunks) for stage, order in enumerate(orders)]
    ends_s = [math.inf] * (2 * stages * chunks * micro_batches + 2)
    ends_s[NOTHING] = -math.inf
    input_parts = [whole - part for whole, part in zip(times.backward_s, times.weight_part_s, strict=True)]
    per_stage: dict[PassKind, Iterable[float]] = {
        PassKind.FORWARD: times.forward_s,
        PassKind.BACKWARD: times.backward_s,
        PassKind.INPUT_GRADIENT: input_parts,
        PassKind.WEIGHT_GRADIENT: times.weight_part_s,
    }
    durations = {kind: [seconds / chunks for seconds in values] for kind, values in per_stage.items()}
    travel_s = times.between_stages_s if stages > 1 else 0.0
    done: list[list[ScheduledPass]] = [[] for _ in orders]
    free_s = [0.0] * stages
    awake, is_awake = deque(range(stages)), [True] * stages
    while awake:
        stage = awake.popleft()
        is_awake[stage] = False
        steps, mine = plan[stage], done[stage]
        for index in range(len(mine), len(steps)):
            task, result, needs, wakes = steps[index]
            if ends_s[needs] == math.inf:
                break
            start_s = max(free_s[stage], ends_s[needs] + travel_s)
            free_s[stage] = ends_s[result] = start_s + durations[task.kind][stage]
            mine.append(ScheduledPass(stage, start_s, free_s[stage], *task))
            if wakes != stage and not is_awake[wakes]:
                awake.append(wakes)
                is_awake[wakes] = True
    assert [len(of_stage) for of_stage in done] == [len(order) for order in orders], "stages wait for each other"
    return [work for of_stage in done for work in of_stage]


IDLE = "."
FILL = {PassKind.FORWARD: "-", PassKind.BACKWARD: "=", PassKind.INPUT_GRADIENT: "=", PassKind.WEIGHT_GRADIENT: "~"}
ROUNDING = 1e-9
NARROWEST = 12  # columns that a drawing needs beside its labels


def draw(timeline: Timeline, columns: int = 100) -> list[str]:
    """Draws one line per stage, at most `columns` wide.

    Work begins with the number of its micro-batch and goes on with a sign for its kind. Where the shortest work is less
    than a column, a column shows what the stage does most of that time, without numbers.
    """
    label = len(f"stage {timeline.stages - 1} ")
    most = max(NARROWEST, columns - label)
    # the shortest pass is a whole number of columns, if there is room
    shortest_s = min((work.end_s - work.start_s for work in timeline.work if work.end_s > work.start_s), default=1.0)
    per_work = math.floor(shortest_s * most / timeline.makespan_s + ROUNDING) if timeline.makespan_s else 1
    rows = _rows(timeline, shortest_s / per_work) if per_work else _coarse_rows(timeline, most)
    return [f"stage {stage}".ljust(label) + row for stage, row in enumerate(rows)]


def legend(timeline: Timeline) -> str:
    """Explains the characters of the drawing."""
    backward = (
        f"{FILL[PassKind.INPUT_GRADIENT]} input gradient, {FILL[PassKind.WEIGHT_GRADIENT]} weight gradient"
        if timeline.schedule is Schedule.ZERO_BUBBLE
        else f"{FILL[PassKind.BACKWARD]} backward"
    )
    return f"{FILL[PassKind.FORWARD]} forward, {backward}, {IDLE} idle; numbers are micro-batches"


def _rows(timeline: Timeline, column_s: float) -> list[str]:
    rows = [[IDLE] * max(1, math.ceil(timeline.makespan_s / column_s - ROUNDING)) for _ in range(timeline.stages)]
    for work in timeline.work:
        first, last = round(work.start_s / column_s), round(work.end_s / column_s)
        name, sign = str(work.micro_batch), FILL[work.kind]
        text = name if len(name) <= last - first else ""
        rows[work.stage][first:last] = text.ljust(last - first, sign)
    return ["".join(row) for row in rows]


def _coarse_rows(timeline: Timeline, columns: int) -> list[str]:
    column_s = timeline.makespan_s / columns
    spent: list[list[dict[str, float]]] = [[{} for _ in range(columns)] for _ in range(timeline.stages)]
    for work in timeline.work:
        row, sign = spent[work.stage], FILL[work.kind]
        for column in range(int(work.start_s / column_s), min(columns, math.ceil(work.end_s / column_s))):
            inside_s = min(work.end_s, (column + 1) * column_s) - max(work.start_s, column * column_s)
            row[column][sign] = row[column].get(sign, 0.0) + inside_s

    def longest(signs: dict[str, float]) -> str:
        idle_s = column_s - sum(signs.values())
        return max([(idle_s, IDLE), *((seconds, sign) for sign, seconds in signs.items())])[1]

    return ["".join(map(longest, row)) for row in spent]
