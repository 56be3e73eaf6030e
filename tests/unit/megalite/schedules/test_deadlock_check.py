"""Programs of pipeline stages end where no message is buffered, and the checker refuses those that would not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.rules.pipeline import FEWEST_CHUNKS, SPLITS_BACKWARD
from megalite.schedules.deadlock_check import Communicators, check_programs
from megalite.schedules.passes import PassKind, Task
from megalite.schedules.program import Compute, Program, Receive, Send, forward_programs, programs_of, training_programs
from megalite.schedules.tables import Schedule, placement
from tests.helpers.pipeline_schedules import DrawnSchedule, pipeline_schedules

KINDS = (PassKind.FORWARD, PassKind.BACKWARD)


@given(pipeline_schedules(most_stages=8))
def test_every_step_ends(drawn: DrawnSchedule) -> None:
    """Also where all operations of a stage with earlier stages share a communicator, and all with later ones."""
    programs = training_programs(*drawn)
    for communicators in Communicators:
        check_programs(programs, communicators)
    for stage, (program, order) in enumerate(zip(programs, drawn.orders(), strict=True)):
        passes = [(action.kind, action.micro_batch) for action in program if isinstance(action, Compute)]
        halves = (PassKind.INPUT_GRADIENT, PassKind.WEIGHT_GRADIENT)  # of a whole backward where others are split
        is_split = drawn.schedule in SPLITS_BACKWARD
        assert passes == [
            (kind, task.micro_batch)
            for task in order
            for kind in (halves if is_split and task.kind is PassKind.BACKWARD else (task.kind,))
        ]
        received = [action.message for action in program if isinstance(action, Receive)]
        assert len(received) == len(set(received)) and {message.target for message in received} <= {stage}
        assert set(received) == {a.needs for a in program if isinstance(a, Compute) and a.needs is not None}


@given(st.sampled_from(Schedule), st.integers(1, 6), st.integers(1, 20), st.integers(0, 2))
def test_forwards_alone_end_with_any_number_of_micro_batches(
    schedule: Schedule, stages: int, micro_batches: int, more: int
) -> None:
    chunks = FEWEST_CHUNKS[schedule.value] + (more if schedule is Schedule.INTERLEAVED else 0)
    programs = forward_programs(schedule, stages, micro_batches, chunks)
    for communicators in Communicators:
        check_programs(programs, communicators)
    passes = sorted((a.position, a.micro_batch) for program in programs for a in program if isinstance(a, Compute))
    assert passes == [(position, number) for position in range(stages * chunks) for number in range(micro_batches)]


def _move(program: Program, begin: int, end: int) -> Program:
    actions = list(program)
    actions.insert(end, actions.pop(begin))
    return tuple(actions)


def _swap_sends(program: Program) -> Program:
    first, second = [index for index, action in enumerate(program) if isinstance(action, Send)][-2:]
    actions = list(program)
    actions[first], actions[second] = actions[second], actions[first]
    return tuple(actions)


def _indices(program: Program, kind: type) -> list[int]:
    return [index for index, action in enumerate(program) if isinstance(action, kind)]


@pytest.mark.parametrize(
    ("rank", "damage", "words"),
    [
        (2, _swap_sends, "rank 2 sends the gradient of micro-batch"),
        (
            1,
            lambda program: tuple(a for i, a in enumerate(program) if i != _indices(program, Receive)[0]),
            "rank 0 sends the activation of micro-batch 0 for position 1, and rank 1 expects the activation of "
            "micro-batch 1 for position 1",
        ),
        (
            2,
            lambda program: tuple(a for i, a in enumerate(program) if i != _indices(program, Receive)[-1]),
            "rank 2 waits before the backward of micro-batch 7 at position 2 for the gradient of micro-batch 7 for "
            "position 2 from rank 3, which it has not begun to receive",
        ),
        (
            3,
            lambda program: program[:-1],
            "rank 2 waits before the backward of micro-batch 7 at position 2 for the gradient of micro-batch 7 for "
            "position 2 from rank 3, which rank 3 has not begun to send",
        ),
        (
            0,
            lambda program: _move(program, _indices(program, Send)[0], _indices(program, Send)[0] - 1),
            "rank 0 sends the activation of micro-batch 0 for position 1 before it has computed it",
        ),
        (
            3,
            lambda program: _move(program, _indices(program, Compute)[1], 1),
            "rank 3 begins the backward of micro-batch 0 at position 3 before the pass of its own",
        ),
        (
            3,
            lambda program: (*program, Receive(program[0].message)),  # type: ignore[union-attr]
            "rank 3 ends its step with receiving the activation of micro-batch 0 for position 3 from rank 2, which "
            "never sends it",
        ),
        (
            0,
            lambda program: (*program, program[_indices(program, Send)[-1]]),
            "rank 0 ends its step with sending the activation of micro-batch 7 for position 1 to rank 1, which never "
            "receives it",
        ),
    ],
)
def test_a_damaged_program_is_refused(rank: int, damage: Callable[[Program], Program], words: str) -> None:
    programs = list(training_programs(Schedule.ONE_F_ONE_B, 4, 8))
    programs[rank] = damage(programs[rank])
    with pytest.raises(ValueError, match=words):
        check_programs(programs)


def test_receptions_begun_early_block_a_shared_communicator_and_no_other() -> None:
    """The rule about shared communicators is not empty: rank 0 begins to receive a gradient before it sends what that
    gradient is computed from."""
    programs = list(training_programs(Schedule.ONE_F_ONE_B, 2, 4))
    programs[0] = _move(programs[0], _indices(programs[0], Receive)[0], 0)
    check_programs(programs)
    with pytest.raises(ValueError, match=r"rank 1 waits before the forward of micro-batch 0 .* behind other messages"):
        check_programs(programs, Communicators.SIDE)


def test_sends_that_wait_for_earlier_ones_must_end_too() -> None:
    """Rank 0 sends everything before it begins to receive, and rank 1 answers at once: the engine keeps
    only so many sends in memory, and then each would wait for the other."""
    forwards, backwards = ([Task(kind, number, 0) for number in range(20)] for kind in KINDS)
    answers = [task for pair in zip(forwards, backwards, strict=True) for task in pair]
    first, second = programs_of([forwards + backwards, answers], (0, 1))
    check_programs((first, second))
    late: list[Compute | Receive | Send] = []
    for action in first:
        if isinstance(action, Compute) and action.needs is not None:
            late.append(Receive(action.needs))
        if not isinstance(action, Receive):
            late.append(action)
    words = (
        "rank 0 waits before sending the activation of micro-batch 16 for position 1 until rank 1 has the activation "
        "of micro-batch 13 for position 1, which it has not begun to receive; rank 1 waits before sending the gradient"
    )
    with pytest.raises(ValueError, match=words):
        check_programs((tuple(late), second))


@pytest.mark.parametrize("schedule", Schedule)
def test_a_table_that_waits_for_itself_is_refused(schedule: Schedule) -> None:
    """The first stage wants a gradient before it has passed on what that gradient is computed from."""
    drawn = DrawnSchedule(schedule, 3, 6, FEWEST_CHUNKS[schedule.value])
    orders = drawn.orders()
    first_gradient = next(i for i, task in enumerate(orders[0]) if task.kind is not PassKind.FORWARD)
    orders[0].insert(0, orders[0].pop(first_gradient))
    waits = r"stages wait for each other: stage 0 before the .* of micro-batch 0|rank 0 begins the .* of micro-batch 0"
    with pytest.raises(ValueError, match=waits):
        check_programs(programs_of(orders, placement(schedule, 3, drawn.chunks)))


def test_a_large_pipeline_is_checked_at_once() -> None:
    programs = training_programs(Schedule.ZB_V, 16, 512, 2)
    started = time.perf_counter()
    check_programs(programs)
    assert time.perf_counter() - started < 30  # 0.35 s where nothing else runs
