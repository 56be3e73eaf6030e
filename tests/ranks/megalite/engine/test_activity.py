"""What a rank notes about itself, and what its watchdog learns from it."""

from __future__ import annotations

import itertools

from megalite.engine.activity import RING, Activity, Operation, Phase
from megalite.parallel.mesh import Mesh
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks


def test_a_step_is_one_stretch_from_its_data_to_its_end() -> None:
    activity = Activity(Mesh(), 0)
    for step in (1, 2):
        activity.begin_phase(Phase.DATA, step)
        activity.begin_phase(Phase.STEP)
        activity.begin_phase(Phase.LOGGING)
    activity.begin_phase(Phase.EVALUATION)
    activity.begin_phase(Phase.CHECKPOINT)
    activity.begin_phase(Phase.DATA, 3)
    kinds = [ended.kind for ended in activity.ended]
    assert kinds == [Phase.STARTING, Phase.STEP, Phase.STEP, Phase.EVALUATION, Phase.CHECKPOINT]
    assert activity.span[:2] == (Phase.STEP, 3)


def test_a_long_stretch_that_moves_starts_its_clock_again() -> None:
    activity = Activity(Mesh(data_parallel_size=2), 0)
    activity.begin_phase(Phase.LOADING)
    before = activity.span
    activity.progress()
    assert activity.span[:2] == before[:2] == (Phase.LOADING, 0)
    assert activity.span.began > before.began
    assert activity.notes()[-1].peers == (0, 1), "all ranks load together"
    assert len(activity.ended) == 1, "only the start has ended"


def test_the_ring_keeps_the_last_notes_of_any_number() -> None:
    activity = Activity(Mesh(data_parallel_size=2), 1)
    for number in range(3 * RING):
        activity.record_op(Operation.FORWARD, number, activity.peers.data)
    notes = activity.notes()
    assert len(notes) == RING
    assert (notes[-1].micro_batch, notes[-1].peers, notes[-1].phase) == (3 * RING - 1, (0, 1), Phase.STARTING)
    assert all(earlier.time <= later.time for earlier, later in itertools.pairwise(notes))


def _noted_by_a_plain_engine(rank: int, zero: int) -> list[tuple[str, int | None, tuple[int, ...]]]:
    case = Case(dp=2, zero=zero, accumulation=2)
    engine = engine_of(case)
    batch = micro_batches_of(engine, case, global_batches(case)[0])
    engine.train_step(batch, 1e-3)
    engine.evaluate(batch[:1], 1)
    return [(note.operation.value, note.micro_batch, note.peers) for note in engine.activity.notes()]


def test_the_plain_engine_notes_what_it_does_and_whom_it_may_wait_for() -> None:
    """The pipelined one's notes are held against DeepSpeed's instructions in test_seams.py."""
    for zero in (1, 3):
        for rank, noted in enumerate(run_ranks(_noted_by_a_plain_engine, 2, zero)):
            forward = (0, 1) if zero == 3 else (rank,)
            assert noted == [
                ("begin", None, (0, 1)),
                ("begin", None, ()),
                ("count_tokens", None, (0, 1)),
                ("load", 1, ()),
                ("forward", 1, forward),
                ("backward", 1, (0, 1)),
                ("optimizer", 1, (0, 1)),
                ("load", 2, ()),
                ("forward", 2, forward),
                ("backward", 2, (0, 1)),
                ("optimizer", 2, (0, 1)),
                ("loss", None, (0, 1)),
                ("finish", None, (0, 1)),
                ("begin", None, (0, 1)),
                ("count_tokens", None, (0, 1)),
                ("load", 1, ()),
                ("forward", 1, forward),
                ("loss", None, (0, 1)),
                ("finish", None, (0, 1)),
            ]
