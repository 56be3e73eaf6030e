"""Tables of pipeline schedules: each pass once, in an order that can be, and as good as torch's own."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

from megalite.config import ConfigError
from megalite.config.rules.pipeline import SPLITS_BACKWARD
from megalite.schedules.passes import PassKind, Task
from megalite.schedules.simulation import PipelineTimes, run_orders, simulate_schedule
from megalite.schedules.tables import Schedule, check_schedule, placement, position_of, tasks_of
from tests.helpers.pipeline_schedules import DrawnSchedule, pipeline_schedules


@given(pipeline_schedules())
def test_each_micro_batch_passes_each_chunk_once_each_way(drawn: DrawnSchedule) -> None:
    """A whole backward counts as both gradients; weight gradients come after input gradients."""
    expected = Counter(
        (kind, micro_batch, chunk)
        for kind in (PassKind.FORWARD, PassKind.INPUT_GRADIENT, PassKind.WEIGHT_GRADIENT)
        for micro_batch in range(drawn.micro_batches)
        for chunk in range(drawn.chunks)
    )
    for order in drawn.orders():
        assert any(task.kind is PassKind.WEIGHT_GRADIENT for task in order) <= (drawn.schedule in SPLITS_BACKWARD)
        parts = []
        for task in order:
            both = (PassKind.INPUT_GRADIENT, PassKind.WEIGHT_GRADIENT)
            parts += [(kind, *task[1:]) for kind in (both if task.kind is PassKind.BACKWARD else (task.kind,))]
        assert Counter(parts) == expected
        at = {part: index for index, part in enumerate(parts)}
        for micro_batch in range(drawn.micro_batches):
            for chunk in range(drawn.chunks):
                forward, first, second = (at[kind, micro_batch, chunk] for kind in (PassKind.FORWARD, *both))
                assert forward < first < second


@given(pipeline_schedules())
def test_every_position_has_one_stage(drawn: DrawnSchedule) -> None:
    where = placement(drawn.schedule, drawn.stages, drawn.chunks)
    assert Counter(where) == dict.fromkeys(range(drawn.stages), drawn.chunks)
    for stage in range(drawn.stages):
        positions = [position_of(drawn.schedule, drawn.stages, stage, chunk) for chunk in range(drawn.chunks)]
        assert positions == [position for position, holder in enumerate(where) if holder == stage]


def test_the_model_is_folded_at_the_last_stage() -> None:
    assert placement(Schedule.ZB_V, 3, 2) == placement(Schedule.DUALPIPE_V, 3, 2) == (0, 1, 2, 2, 1, 0)
    assert placement(Schedule.INTERLEAVED, 3, 2) == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("schedule", [Schedule.ZB_V, Schedule.DUALPIPE_V, Schedule.INTERLEAVED])
def test_tables_are_as_good_as_those_of_torch(schedule: Schedule, stages: int) -> None:
    """The same passes on each stage, and no longer with forwards, input and weight gradients of equal length."""
    where, times = placement(schedule, stages, 2), PipelineTimes([2.0] * stages, [4.0] * stages)
    sizes = (1, stages, 2 * stages, 2 * stages + 1, 5 * stages)
    if schedule is Schedule.INTERLEAVED:
        sizes = (stages, 2 * stages, 5 * stages)
    for micro_batches in sizes[2:] if schedule is Schedule.DUALPIPE_V else sizes:
        theirs = _torch_orders(schedule, stages, micro_batches, where)
        ours = DrawnSchedule(schedule, stages, micro_batches, 2).orders()
        assert [set(order) for order in ours] == [set(order) for order in theirs], (stages, micro_batches)
        ends = [max(work[-1].end_s for work in run_orders(orders, where, times)) for orders in (ours, theirs)]
        assert ends[0] <= ends[1], (stages, micro_batches)


def _torch_orders(schedule: Schedule, stages: int, micro_batches: int, where: tuple[int, ...]) -> list[list[Task]]:
    """The table of torch's schedule, which it makes from fields of its stages alone."""
    module = pytest.importorskip("torch.distributed.pipelining.schedules")
    names = {Schedule.ZB_V: "ZBVZeroBubble", Schedule.DUALPIPE_V: "DualPipeV", Schedule.INTERLEAVED: "Interleaved1F1B"}
    kinds = {
        module.FORWARD: PassKind.FORWARD,
        module.FULL_BACKWARD: PassKind.BACKWARD,
        module.BACKWARD_INPUT: PassKind.INPUT_GRADIENT,
        module.BACKWARD_WEIGHT: PassKind.WEIGHT_GRADIENT,
    }
    held = [[position for position, stage in enumerate(where) if stage == rank] for rank in range(stages)]
    fields: dict[str, Any] = {"num_stages": len(where), "group_size": stages, "group_rank": 0, "has_backward": True}
    fields |= {"submod": module.torch.nn.Identity(), "device": "cpu"}
    of_rank_0 = [
        SimpleNamespace(stage_index=at, is_first=at == 0, is_last=at == len(where) - 1, **fields) for at in held[0]
    ]
    made = getattr(module, f"Schedule{names[schedule]}")(of_rank_0, micro_batches, loss_fn=lambda *_: None)
    orders = []
    for rank, row in made.pipeline_order.items():
        actions = [one for action in row if action is not None for one in action.sub_actions or (action,)]
        orders.append(
            [Task(kinds[a.computation_type], a.microbatch_index, held[rank].index(a.stage_index)) for a in actions]
        )
    return orders


@pytest.mark.parametrize(
    ("schedule", "stages", "micro_batches", "chunks", "held"),
    [
        (Schedule.ONE_F_ONE_B, 4, 8, 1, (4, 3, 2, 1)),
        (Schedule.INTERLEAVED, 4, 8, 2, (11, 9, 7, 5)),
        (Schedule.ZERO_BUBBLE, 4, 8, 1, (4, 4, 4, 4)),
        (Schedule.ZB_V, 4, 8, 2, (8, 8, 8, 8)),
        (Schedule.DUALPIPE_V, 4, 8, 2, (9, 9, 9, 9)),
        (Schedule.ZB_V, 6, 30, 2, (12,) * 6),
        (Schedule.DUALPIPE_V, 6, 30, 2, (13,) * 6),
    ],
)
def test_chunks_are_held_as_the_papers_say(
    schedule: Schedule, stages: int, micro_batches: int, chunks: int, held: tuple[int, ...]
) -> None:
    """Until their weight gradients: 2 p in ZB-V (Qi 2023, section 6), 2 p + 1 in DualPipeV (DeepSeek's PP + 1)."""
    times = PipelineTimes([1.0] * stages, [2.0] * stages)
    assert simulate_schedule(schedule, times, micro_batches, chunks).peak_in_flight == held


@pytest.mark.parametrize(
    ("schedule", "micro_batches", "chunks", "words"),
    [
        (Schedule.INTERLEAVED, 10, 2, "no multiple of it: use 8"),
        (Schedule.INTERLEAVED, 8, 1, "with one, use 1f1b"),
        (Schedule.ONE_F_ONE_B, 8, 2, "use interleaved"),
        (Schedule.ZERO_BUBBLE, 8, 2, "use interleaved"),
        (Schedule.ONE_F_ONE_B, 0, 1, "at least one"),
        (Schedule.ZB_V, 8, 1, "exactly 2 chunks per stage, not 1"),
        (Schedule.DUALPIPE_V, 8, 3, "exactly 2 chunks per stage, not 3"),
        (Schedule.DUALPIPE_V, 7, 2, "8 for 4 stages, and there are 7"),
    ],
)
def test_a_schedule_that_cannot_be_is_named(schedule: Schedule, micro_batches: int, chunks: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_schedule(schedule, 4, micro_batches, chunks)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 3), (2, 1), (4, 2), (4, 4), (4, 11), (7, 20)])
def test_1f1b_is_the_order_in_which_deepspeed_works(stages: int, micro_batches: int) -> None:
    pipe = pytest.importorskip("deepspeed.runtime.pipe.schedule")
    for stage in range(stages):
        theirs = [
            PassKind.FORWARD if isinstance(command, pipe.ForwardPass) else PassKind.BACKWARD
            for commands in pipe.TrainSchedule(micro_batches, stages, stage)
            for command in commands
            if isinstance(command, pipe.ForwardPass | pipe.BackwardPass)
        ]
        ours = tasks_of(Schedule.ONE_F_ONE_B, stages, stage, micro_batches)
        assert [task.kind for task in ours] == theirs
        for kind in (PassKind.FORWARD, PassKind.BACKWARD):  # both go through the micro-batches in order
            assert [task.micro_batch for task in ours if task.kind is kind] == list(range(micro_batches))
