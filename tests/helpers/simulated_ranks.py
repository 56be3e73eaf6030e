"""Timelines of ranks that did exactly what the planner simulates: what an analysis of them should find is known."""

from __future__ import annotations

from megalite.monitor.steps.timeline import Owner, RankTimeline
from megalite.schedules.passes import PassKind
from megalite.schedules.simulation import ScheduledPass, Timeline
from megalite.schedules.tables import placement, position_of
from megalite.tracing.activity import Note, Operation, Phase

OPERATIONS = {
    PassKind.FORWARD: Operation.FORWARD,
    PassKind.BACKWARD: Operation.BACKWARD,
    PassKind.INPUT_GRADIENT: Operation.BACKWARD,
    PassKind.WEIGHT_GRADIENT: Operation.WEIGHT_GRADIENT,
}


def ranks_of(timeline: Timeline, step: int = 10, boot: str = "1f", before_s: float = 5.0) -> dict[int, RankTimeline]:
    """The timelines of one rank per stage; the clock shows `before_s` when the first pass begins.

    A hundredth of the step before it is waiting for data, and two after it are the optimizer.
    """
    ended = before_s + 1.02 * timeline.makespan_s
    where = placement(timeline.schedule, timeline.stages, timeline.chunks)
    return {
        stage: RankTimeline(
            Owner(
                rank=stage,
                stage=stage,
                data=0,
                tensor=0,
                host=f"node{stage}",
                boot=boot,
                tensor_parallel_size=1,
                pipeline_parallel_size=timeline.stages,
                data_parallel_size=1,
                schedule=timeline.schedule.value,
                chunks=timeline.chunks,
                micro_batches=timeline.micro_batches,
            ),
            step=step,
            ended=ended,
            unix=1.7e9 + ended,
            notes=_notes(timeline, stage, step, where, before_s),
            collectives=[],
            meetings={number: before_s - 20.0 + number for number in range(step)},
        )
        for stage in range(timeline.stages)
    }


def _notes(timeline: Timeline, stage: int, step: int, where: tuple[int, ...], before_s: float) -> list[Note]:
    """A stage is blocked in a reception from the end of the pass before, and sends at the end of its own."""
    notes = [Note(before_s - timeline.makespan_s / 100, 7, step, Phase.DATA, Operation.BEGIN, None, ())]

    def note(time_s: float, operation: Operation, micro_batch: int | None, chunk: int | None) -> None:
        chunk = chunk if timeline.chunks > 1 else None
        notes.append(Note(before_s + time_s, 8, step, Phase.STEP, operation, micro_batch, (), chunk))

    free_s, passes = 0.0, [work for work in timeline.work if work.stage == stage]
    note(free_s, Operation.BEGIN, None, None)
    for work in sorted(passes, key=lambda each: each.start_s):
        position, number = position_of(timeline.schedule, timeline.stages, stage, work.chunk), work.micro_batch + 1
        before, after = _neighbours(work, position)
        is_forward = work.kind is PassKind.FORWARD
        if before is not None and 0 <= before < len(where) and where[before] != stage:
            receive = Operation.RECEIVE_ACTIVATION if is_forward else Operation.RECEIVE_GRADIENT
            note(free_s, receive, number, position)
        elif work.start_s > free_s:
            note(free_s, Operation.FINISH, None, None)  # nothing is done
        note(work.start_s, OPERATIONS[work.kind], number, position)
        if after is not None and 0 <= after < len(where) and where[after] != stage:
            send = Operation.SEND_ACTIVATION if is_forward else Operation.SEND_GRADIENT
            note(work.end_s, send, number, after)
        free_s = work.end_s
    note(free_s, Operation.OPTIMIZER, None, None)
    return notes


def _neighbours(work: ScheduledPass, position: int) -> tuple[int | None, int | None]:
    """Returns the positions from which a pass gets its input, and to which its result goes."""
    if work.kind is PassKind.WEIGHT_GRADIENT:
        return None, None
    return (position - 1, position + 1) if work.kind is PassKind.FORWARD else (position + 1, position - 1)
