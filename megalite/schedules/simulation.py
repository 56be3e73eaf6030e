"""Simulates pipeline schedules in one optimizer step.

In: the time of each stage for one micro-batch. Out: a `Timeline`, every piece of work with start and end. Each stage
does its tasks in a fixed order, one at a time; a task starts as soon as the stage is free and its input is there.
Activations and gradients travel while the stages compute: a stage waits for what it receives, not for what it sends.
No torch.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from megalite.config import ConfigError
from megalite.schedules.passes import PassKind, Task
from megalite.schedules.tables import Schedule, check_schedule, placement, positions_by_stage, tasks_of

SIMULATED = 4  # micro-batches per stage, beyond which a step goes on as before


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
    def are_equal(self) -> bool:
        """True if all stages take as long."""
        return len(set(self.forward_s)) == len(set(self.backward_s)) == 1

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
        peaks, held = [0] * self.stages, [0] * self.stages
        for work in self.work:
            if work.kind is PassKind.FORWARD:
                held[work.stage] += 1
                peaks[work.stage] = max(peaks[work.stage], held[work.stage])
            elif work.kind is not PassKind.INPUT_GRADIENT:
                held[work.stage] -= 1
        return tuple(peaks)


def simulate_schedule(schedule: Schedule, times: PipelineTimes, micro_batches: int, chunks: int = 1) -> Timeline:
    """Simulates a step of `times.stages` stages. A chunk takes `1 / chunks` of its stage's time.

    Raises ConfigError for a schedule that does not exist, such as interleaving without chunks.
    """
    times.check()
    check_schedule(schedule, times.stages, micro_batches, chunks)
    orders = [tasks_of(schedule, times.stages, stage, micro_batches, chunks) for stage in range(times.stages)]
    work = run_orders(orders, placement(schedule, times.stages, chunks), times)
    return Timeline(schedule, times.stages, micro_batches, chunks, tuple(chain.from_iterable(work)))


def makespan_of_passes(
    orders: Sequence[Sequence[Task]], where: Sequence[int], seconds: Mapping[tuple[PassKind, int], float]
) -> float:
    """Returns the seconds from the first pass to the last one's end with free messages.

    `where` names the stage of each position of the model, and `seconds` what a pass of a kind takes there, 0 if it
    names none. Raises ValueError if stages wait for each other forever.
    """
    of_stages = positions_by_stage(where)
    flat = [seconds.get((kind, at), 0.0) for positions in of_stages for at in positions for kind in KINDS]
    return max(_run(_sorted_steps(orders, where), flat, len(orders), 0.0)[1])


def bubble_closed_form(schedule: Schedule, stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Returns idle over working time for equal stages and free communication.

    1F1B (p - 1) / m and interleaved (p - 1) / (v m): Narayanan 2021 (arXiv:2104.04473), section 2.2. The others for
    forward, input gradient and weight gradient of equal length. Zero-bubble, from p micro-batches on: the bubble of
    ZB-H1 is (p - 1)(T_F + T_B - T_W), Qi 2023 (arXiv:2401.10241), a third of 1F1B's. ZB-V, from 2 p - 2 micro-batches
    on: none if each stage's time is counted from its own first pass (Qi 2023, section 6); counted from the first pass
    of all, as here, each stage waits p - 1 passes of a chunk, at its begin or its end. DualPipeV: as long; DeepSeek's
    (p - 1)(F&B + B - 3 W), in passes of chunks, is twice that.
    """
    bubble = (stages - 1) / micro_batches
    match schedule:
        case Schedule.ONE_F_ONE_B:
            return bubble
        case Schedule.INTERLEAVED:
            return bubble / chunks
        case Schedule.ZERO_BUBBLE:
            return bubble / 3
        case Schedule.ZB_V | Schedule.DUALPIPE_V:
            return bubble / 6


def idle_of_equal_stages(schedule: Schedule, times: PipelineTimes, micro_batches: int, chunks: int) -> float:
    """Returns the seconds of a step beyond those in which each stage computes.

    After `SIMULATED` micro-batches per stage each further one is taken to add what the last ones added.
    """
    stages, work_s = times.stages, times.forward_s[0] + times.backward_s[0]
    if micro_batches <= SIMULATED * stages:
        return _makespan_s(schedule, times, micro_batches, chunks) - micro_batches * work_s
    most, fewer = SIMULATED * stages, (SIMULATED - 1) * stages
    most_s, fewer_s = (_makespan_s(schedule, times, count, chunks) for count in (most, fewer))
    each_s = (most_s - fewer_s) / stages
    return most_s - most * work_s + (micro_batches - most) * (each_s - work_s)


@lru_cache(maxsize=4096)
def _makespan_s(schedule: Schedule, times: PipelineTimes, micro_batches: int, chunks: int) -> float:
    if schedule is Schedule.ONE_F_ONE_B and times.are_equal:
        return _makespan_of_1f1b_s(times, micro_batches)
    return max(_run_times(_steps_of(schedule, times.stages, micro_batches, chunks), times, chunks)[1])


def _makespan_of_1f1b_s(times: PipelineTimes, micro_batches: int) -> float:
    """Returns the longest of the paths through passes of equal stages that wait for each other.

    Stage s of p runs forward c and then backward c - (p - 1 - s) in round c. A path leads within a round to later
    stages by forwards; to the next round by the backward of the stage before, or on the same stage. Each of the
    m + p - 1 rounds brings one forward and one backward, and there are as many messages back as forth. After at most
    p - 1 rounds of messages back a path has reached the first stage, and needs a round for a forward there.
    """
    p, work_s = times.stages, times.forward_s[0] + times.backward_s[0]
    back = p - 1 + micro_batches - 1 - -(-(micro_batches - 1) // p)  # messages
    return (micro_batches + p - 1) * work_s + 2 * back * times.between_stages_s


class LastGradients(NamedTuple):
    """The last pass of a step that makes gradients of a chunk's weights; seconds before the last backward pass of all
    stages ends, which are negative or 0."""

    start_s: float
    end_s: float


@lru_cache(maxsize=4096)
def last_gradients(
    schedule: Schedule, times: PipelineTimes, micro_batches: int, chunks: int
) -> tuple[tuple[LastGradients, ...], ...]:
    """Returns for each stage and each of its chunks when the last gradients of weights are made.

    From two micro-batches per stage on a step is taken to end as one with so many.
    """
    if schedule is Schedule.ONE_F_ONE_B and times.are_equal:  # each stage has nothing left after the one behind it
        backward_s = times.backward_s[0]
        ends_s = [-stage * (backward_s + times.between_stages_s) for stage in range(times.stages)]
        return tuple((LastGradients(end_s - backward_s, end_s),) for end_s in ends_s)
    micro_batches = min(micro_batches, 2 * times.stages)
    steps = _steps_of(schedule, times.stages, micro_batches, chunks)
    starts_s, free_s = _run_times(steps, times, chunks)
    durations_s = [_durations_s(times, stage) for stage in range(times.stages)]
    makespan_s, makes_gradients = max(free_s), (KINDS[PassKind.BACKWARD], KINDS[PassKind.WEIGHT_GRADIENT])
    last: dict[tuple[int, int], LastGradients] = {}
    for stage, chunk, kind, start_s in zip(steps.stage, steps.chunk, steps.kind, starts_s, strict=True):
        if kind in makes_gradients:
            begin_s = start_s - makespan_s
            last[stage, chunk] = LastGradients(begin_s, begin_s + durations_s[stage][kind] / chunks)
    return tuple(tuple(last[stage, chunk] for chunk in range(chunks)) for stage in range(times.stages))


class _OrderedPasses(NamedTuple):
    """The tasks of all stages, each after what it needs, as one sequence for each property: `array` holds a step of a
    large pipeline in a few bytes. Results are numbered; when they were ready is kept by that number."""

    stage: array[int]
    chunk: array[int]
    kind: array[int]  # its number in `KINDS`
    result: array[int]
    needs: array[int]
    travels: array[int]  # 1 if what it needs comes from another stage


KINDS = {kind: number for number, kind in enumerate(PassKind)}
NOTHING = -1  # what a task needs that needs nothing from another position
UNUSED = -2  # the result of a task that no other needs


@lru_cache(maxsize=64)
def _steps_of(schedule: Schedule, stages: int, micro_batches: int, chunks: int) -> _OrderedPasses:
    """Returns the steps of a schedule, which are the same for all times. Raises ConfigError as `simulate_schedule`."""
    check_schedule(schedule, stages, micro_batches, chunks)
    orders = [tasks_of(schedule, stages, stage, micro_batches, chunks) for stage in range(stages)]
    return _sorted_steps(orders, placement(schedule, stages, chunks))


def _sorted_steps(orders: Sequence[Sequence[Task]], where: Sequence[int]) -> _OrderedPasses:
    """Forwards need the position before, gradients the one after. What a task needs of its own chunk comes earlier in
    its order. Raises ValueError if stages wait for each other forever."""
    last, most = len(where) - 1, 1 + max((task.micro_batch for order in orders for task in order), default=0)
    positions = positions_by_stage(where)
    is_ready = bytearray(2 * len(where) * most + 2)
    is_ready[NOTHING] = True
    steps = _OrderedPasses(*(array("l") for _ in _OrderedPasses._fields))
    done = [0] * len(orders)
    awake = deque(range(len(orders)))
    while awake:
        stage = awake.popleft()
        order = orders[stage]
        while done[stage] < len(order):
            kind, micro_batch, chunk = order[done[stage]]
            position = positions[stage][chunk]
            at = position * most + micro_batch
            needs, result, source, wakes = NOTHING, UNUSED, stage, stage
            if kind is PassKind.FORWARD:
                result = at
                if position:
                    needs, source = at - most, where[position - 1]
                wakes = where[min(position + 1, last)]
            elif kind is not PassKind.WEIGHT_GRADIENT:
                result = len(where) * most + at
                if position < last:
                    needs, source = result + most, where[position + 1]
                wakes = where[max(position - 1, 0)]
            if not is_ready[needs]:
                break
            is_ready[result] = True
            for values, value in zip(steps, (stage, chunk, KINDS[kind], result, needs, source != stage), strict=True):
                values.append(value)
            done[stage] += 1
            if wakes != stage and wakes not in awake:
                awake.append(wakes)
    waiting = [
        f"stage {stage} before the {order[count].kind} of micro-batch {order[count].micro_batch} through its "
        f"chunk {order[count].chunk}"
        for stage, (order, count) in enumerate(zip(orders, done, strict=True))
        if count < len(order)
    ]
    if waiting:
        raise ValueError("stages wait for each other: " + ", ".join(waiting))
    return steps


def _run_times(steps: _OrderedPasses, times: PipelineTimes, chunks: int) -> tuple[list[float], list[float]]:
    """Runs passes of which each takes `1 / chunks` of its stage's time; returns what `_run` does."""
    each_s = [[seconds / chunks for seconds in _durations_s(times, stage)] for stage in range(times.stages)]
    durations_s = [seconds for of_chunk in each_s for seconds in of_chunk * chunks]
    return _run(steps, durations_s, times.stages, times.between_stages_s)


def _run(
    steps: _OrderedPasses, durations_s: Sequence[float], stages: int, between_stages_s: float
) -> tuple[list[float], list[float]]:
    """Starts each task as soon as its stage is free and its input is there.

    `durations_s` are by stage, chunk and kind. Returns when each step starts, and when each stage ends.
    """
    a_stage = len(durations_s) // stages
    starts_s: list[float] = []
    free_s, ends_s = [0.0] * stages, [0.0] * (max(steps.result, default=0) + 3)
    ends_s[NOTHING] = -math.inf
    for stage, chunk, kind, result, needs, travels in zip(*steps, strict=True):
        start_s = ends_s[needs] + between_stages_s if travels else ends_s[needs]
        if start_s < free_s[stage]:
            start_s = free_s[stage]
        starts_s.append(start_s)
        free_s[stage] = ends_s[result] = start_s + durations_s[stage * a_stage + chunk * len(KINDS) + kind]
    return starts_s, free_s


def _durations_s(times: PipelineTimes, stage: int) -> tuple[float, ...]:
    """Returns the seconds of a pass of each of `KINDS` through all chunks of a stage."""
    backward_s, weight_s = times.backward_s[stage], times.weight_part_s[stage]
    return times.forward_s[stage], backward_s, backward_s - weight_s, weight_s


def run_orders(
    orders: Sequence[Sequence[Task]], where: Sequence[int], times: PipelineTimes
) -> list[list[ScheduledPass]]:
    """Starts every task of each stage's order as soon as possible, waiting for its input until the sender is done.

    `where` names the stage of each position of the model. Raises ValueError if stages wait for each other forever.
    """
    steps, chunks = _sorted_steps(orders, where), len(where) // len(orders)
    durations_s = [[seconds / chunks for seconds in _durations_s(times, stage)] for stage in range(len(orders))]
    done: list[list[ScheduledPass]] = [[] for _ in orders]
    for stage, kind, start_s in zip(steps.stage, steps.kind, _run_times(steps, times, chunks)[0], strict=True):
        mine = done[stage]
        mine.append(ScheduledPass(stage, start_s, start_s + durations_s[stage][kind], *orders[stage][len(mine)]))
    return done
