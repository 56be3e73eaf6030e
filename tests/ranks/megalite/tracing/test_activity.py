"""What a rank notes about itself, and what its watchdog learns from it."""

from __future__ import annotations

import itertools

from megalite.parallel.mesh import Mesh
from megalite.tracing.activity import RING, Activity, Operation, Phase
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


def test_many_reductions_inside_a_backward_leave_the_messages_before_it_in_the_ring() -> None:
    activity = Activity(Mesh(data_parallel_size=2), 1)
    activity.record_op(Operation.SEND_GRADIENT, 7, chunk=1)
    activity.record_op(Operation.BACKWARD, 8, (1,), 0)
    for number in range(1, RING + 1):
        with activity.interruption(Operation.REDUCE_GRADIENTS, number, activity.peers.data):
            assert (activity.now.operation, activity.now.micro_batch) == (Operation.REDUCE_GRADIENTS, number)
    noted = [(note.operation, note.micro_batch, note.chunk) for note in activity.notes()[1:]]
    backward = (Operation.BACKWARD, 8, 0)
    sent, reduced = (Operation.SEND_GRADIENT, 7, 1), (Operation.REDUCE_GRADIENTS, RING, None)
    assert noted == [sent, backward, reduced, backward]
    activity.record_op(Operation.BACKWARD, 9, (1,), 0)
    with activity.interruption(Operation.REDUCE_GRADIENTS, 1, activity.peers.data):
        pass
    assert len(activity.notes()) == 1 + len(noted) + 3, "an interruption of what comes next is one of its own"


def _noted_by_a_plain_engine(rank: int, zero: int) -> list[tuple[str, int | None, tuple[int, ...]]]:
    case = Case(dp=2, zero=zero, accumulation=2)
    engine = engine_of(case)
    batch = micro_batches_of(engine, case, global_batches(case)[0])
    engine.train_step(batch, 1e-3)
    engine.evaluate(batch[:1], 1)
    return [(note.operation.value, note.micro_batch, note.peers) for note in engine.activity.notes()]


def test_the_plain_engine_notes_what_it_does_and_whom_it_may_wait_for() -> None:
    for zero in (1, 3):
        for rank, noted in enumerate(run_ranks(_noted_by_a_plain_engine, 2, zero)):
            forward = backward = (0, 1) if zero == 3 else (rank,)
            # of vectors first, while backward goes on to the embedding, then of matrices, which is the one that is
            # kept, under ZeRO-3 for each micro-batch; in the end all are waited for
            reductions = [("reduce_gradients", 2, (0, 1)), ("backward", 1, backward)] if zero == 3 else []
            last = ("reduce_gradients", 4 if zero == 3 else 2, (0, 1))
            assert noted == [
                ("begin", None, (0, 1)),
                ("begin", None, ()),
                ("count_tokens", None, (0, 1)),
                ("load", 1, ()),
                ("forward", 1, forward),
                ("backward", 1, backward),
                *reductions,
                ("load", 2, ()),
                ("forward", 2, forward),
                ("backward", 2, backward),
                *(last, ("backward", 2, backward), last),
                ("optimizer", None, (0, 1)),
                ("loss", None, (0, 1)),
                *([("gather_weights", None, (0, 1))] if zero == 1 else []),
                ("finish", None, (0, 1)),
                ("begin", None, (0, 1)),
                ("count_tokens", None, (0, 1)),
                ("load", 1, ()),
                ("forward", 1, forward),
                # forward waits for matrices, then for vectors, which is the one that is kept
                *([("gather_weights", 2, (0, 1)), ("forward", 1, forward)] if zero == 1 else []),
                ("loss", None, (0, 1)),
                ("finish", None, (0, 1)),
            ]


def _noted_by_a_pipeline(rank: int) -> dict[str, list[tuple[str, int | None, tuple[int, ...]]]]:
    case = Case(pp=2, accumulation=2, model={"tie_word_embeddings": True})
    engine = engine_of(case)
    batch = micro_batches_of(engine, case, global_batches(case)[0])
    noted = {}
    for phase, execute in (
        (Phase.STEP, lambda: engine.train_step(batch, 1e-3)),
        (Phase.EVALUATION, lambda: engine.evaluate(batch, case.accumulation)),
    ):
        execute()
        notes = engine.activity.notes()
        noted[phase.value] = [
            (note.operation.value, note.micro_batch, note.peers)
            for note in notes
            if note.phase_number == notes[-1].phase_number
        ]
    return noted


def test_a_pipeline_notes_each_pass_and_message_before_it_begins() -> None:
    """A message that is sent is noted twice: when it begins, and when the rank waits for it at the end."""
    first, last = run_ranks(_noted_by_a_pipeline, 2)
    end = [
        ("reduce_tied_gradients", None, (0, 1)),
        ("optimizer", None, (0, 1)),
        ("loss", None, (0, 1)),
        ("unite_tied_weights", None, (0, 1)),
        ("finish", None, (0, 1)),
    ]
    assert first["step"] == [
        ("begin", None, ()),
        *[("load", 1, ()), ("forward", 1, (0,)), ("send_activation", 1, ())],
        *[("load", 2, ()), ("forward", 2, (0,)), ("send_activation", 2, ())],
        *[("receive_gradient", 1, (1,)), ("backward", 1, (0,))],
        *[("receive_gradient", 2, (1,)), ("backward", 2, (0,))],
        *[("await_activation", number, (1,)) for number in (1, 2)],
        *end[:2],
        ("loss", None, (1,)),
        *end[3:],
    ]
    assert last["step"] == [
        ("begin", None, ()),
        *[("receive_activation", 1, (0,)), ("forward", 1, (1,)), ("backward", 1, (1,)), ("send_gradient", 1, ())],
        *[("receive_activation", 2, (0,)), ("forward", 2, (1,)), ("backward", 2, (1,)), ("send_gradient", 2, ())],
        *[("await_gradient", number, (0,)) for number in (1, 2)],
        *end,
    ]
    names = [[name for name, *_ in noted["evaluation"]] for noted in (first, last)]
    assert names[0] == [
        "begin",
        *["load", "forward", "send_activation"] * 2,
        *["await_activation"] * 2,
        "loss",
        "finish",
    ]
    assert names[1] == ["begin", *["receive_activation", "forward"] * 2, "loss", "finish"]
