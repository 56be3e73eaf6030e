"""The explanation finds the rank that holds the others up, wherever it stopped, and says it in few words."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalite.config import ConfigError
from megalite.config.rules.pipeline import FEWEST_CHUNKS, SPLITS_BACKWARD
from megalite.engine.pipeline.pipeline_runtime import ProgramRun, StageContext
from megalite.engine.pipeline.stage_messages import MessageLayout
from megalite.parallel.deferred_weight_gradients import WeightGradientQueue
from megalite.parallel.layers import BlockInput
from megalite.parallel.mesh import Mesh
from megalite.resilience.hang_report import PARTNERS, NoResponse, explain
from megalite.resilience.rank_state import RankState
from megalite.schedules.program import Message, forward_programs, training_programs
from megalite.schedules.tables import Schedule, check_schedule, placement
from megalite.tracing.activity import NOBODY, RING, Activity, Note, Operation, Peers, Phase
from tests.helpers.late_gradients import Sums

STEPS = 3


@dataclass(frozen=True)
class Run:
    """What a simulated run does on every rank, note by note."""

    mesh: Mesh
    notes: tuple[tuple[Note, ...], ...]  # by rank


class _Nobody:
    """A transport and its works: nothing is sent, and nothing is through before somebody waits for it."""

    def send(self, message: Message, tensor: Tensor) -> Any:
        return self

    receive = send

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None: ...


def _chunk(inputs: BlockInput, labels: None) -> Any:
    """Layers that pass on what they get; a loss behind the last of them."""
    return BlockInput(inputs.hidden * 1.0)


def _last_chunk(inputs: BlockInput, labels: None) -> Any:
    return inputs.hidden.sum()


@dataclass(frozen=True)
class Pipeline:
    """The order in which the stages of a simulated run compute."""

    schedule: Schedule = Schedule.ONE_F_ONE_B
    micro_batches: int = 1

    def run(self, activity: Activity, *, is_trained: bool) -> None:
        """Runs one stage's program, as the engine does, over layers that do nothing."""
        mesh, at, chunks = activity.mesh, activity.mesh.coordinate(activity.rank), FEWEST_CHUNKS[self.schedule.value]
        stages, stage = mesh.pipeline_parallel_size, at.pipeline_rank
        where = placement(self.schedule, stages, chunks)
        last = len(where) - 1
        context = StageContext(
            {place: _last_chunk if place == last else _chunk for place in range(last + 1) if where[place] == stage},  # type: ignore[misc]
            last,
            _Nobody(),
            lambda output, gradient: output.backward(gradient),
            activity,
            [mesh.rank(each, at.replica, at.tensor_rank) for each in range(stages)],
            activity.peers.stage,
            WeightGradientQueue() if self.schedule in SPLITS_BACKWARD else None,
            Sums(),
        )
        layout = MessageLayout((1, 1, 1), torch.float32, torch.device("cpu"))
        programs = training_programs if is_trained else forward_programs
        with torch.set_grad_enabled(is_trained):
            ProgramRun(
                context, layout, lambda _: BlockInput(torch.ones(1, 1, 1, requires_grad=is_trained)), lambda _: None
            ).run(programs(self.schedule, stages, self.micro_batches, chunks)[stage])

    @classmethod
    def of(cls, schedule: Schedule, stages: int, micro_batches: int) -> Pipeline:
        """Returns one with at least so many micro-batches, and as many as the schedule demands."""
        while True:
            with suppress(ConfigError):
                check_schedule(schedule, stages, micro_batches, FEWEST_CHUNKS[schedule.value])
                return cls(schedule, micro_batches)
            micro_batches += 1


@cache
def run_of(mesh: Mesh, pipeline: Pipeline, steps: int = STEPS) -> Run:
    return Run(mesh, tuple(tuple(_notes_of_rank(mesh, rank, pipeline, steps)) for rank in range(mesh.world_size)))


def _notes_of_rank(mesh: Mesh, rank: int, pipeline: Pipeline, steps: int) -> list[Note]:
    """A few steps as the loop and the engines note them; loading is left out."""
    activity = Activity(mesh, rank)
    activity._ring = deque(activity._ring)  # without its limit
    for step in range(1, steps + 1):
        for phase in (Phase.DATA, Phase.STEP, Phase.EVALUATION, Phase.LOGGING, Phase.CHECKPOINT):
            activity.begin_phase(phase, step)
            match phase:
                case Phase.STEP | Phase.EVALUATION:
                    _note_batch(activity, pipeline, is_trained=phase is Phase.STEP)
                case Phase.LOGGING:
                    activity.record_op(Operation.MEET, peers=activity.peers.everyone)
    return activity.notes()


def _note_batch(activity: Activity, pipeline: Pipeline, *, is_trained: bool) -> None:
    mesh, stage = activity.mesh, activity.mesh.coordinate(activity.rank).pipeline_rank
    if mesh.pipeline_parallel_size == 1 or stage in (0, mesh.pipeline_parallel_size - 1):
        activity.record_op(Operation.COUNT_TOKENS, peers=activity.peers.data)
    if mesh.pipeline_parallel_size > 1:
        pipeline.run(activity, is_trained=is_trained)
    elif is_trained:
        for number in range(1, pipeline.micro_batches + 1):
            activity.record_op(Operation.FORWARD, number, activity.peers.tensor)
            activity.record_op(Operation.BACKWARD, number, activity.peers.stage)
    if is_trained:
        activity.record_op(Operation.OPTIMIZER, peers=activity.peers.everyone)
    activity.record_op(Operation.LOSS, peers=activity.peers.data)
    activity.record_op(Operation.FINISH, peers=activity.peers.everyone)


def _stand_still(run: Run, culprit: int, at: int, free: Sequence[Operation]) -> list[int]:
    """Where every rank is in the end if `culprit` never gets past its note `at`; nobody waits at `free` operations."""
    places = [0] * run.mesh.world_size
    where: list[dict[Any, int]] = [{} for _ in run.notes]
    for rank, notes in enumerate(run.notes):
        for index, note in enumerate(notes):
            where[rank].setdefault(_key(note), index)  # what is sent is noted again when somebody waits for it
    moved = True
    while moved:
        moved = False
        for rank, notes in enumerate(run.notes):
            while places[rank] < (at if rank == culprit else len(notes) - 1):
                note = notes[places[rank]]
                wanted = _key(note._replace(operation=PARTNERS.get(note.operation, note.operation)))
                peers = NOBODY if note.operation in free else note.peers
                if any(places[peer] < where[peer][wanted] for peer in peers if peer != rank):
                    break
                places[rank] += 1
                moved = True
    return places


def _key(note: Note) -> tuple[int, Operation, int | None, int | None]:
    return note.phase_number, note.operation, note.micro_batch, note.chunk


def _states(run: Run, places: Sequence[int], silent: int | None = None) -> dict[int, RankState]:
    states = {}
    for rank, (notes, place) in enumerate(zip(run.notes, places, strict=True)):
        if rank != silent:
            seen = [note._replace(time=10.0) for note in notes[: place + 1][-RING:]]
            states[rank] = RankState(rank=rank, host="here", process=1, reason="", notes=tuple(seen))
    return states


SENDS = (Operation.AWAIT_ACTIVATION, Operation.AWAIT_GRADIENT)
ON_A_CPU = (Operation.BEGIN, Operation.FINISH)  # where a rank does not wait, though it may have peers
ON_A_DEVICE = tuple(set(Operation) - {Operation.FINISH})  # the host is ahead of it, until it reads a result


@given(
    mesh=st.builds(Mesh, st.integers(1, 2), st.integers(1, 4), st.integers(1, 3)).filter(
        lambda mesh: mesh.world_size > 1
    ),
    schedule=st.sampled_from(Schedule),
    micro_batches=st.integers(1, 6),
    culprit=st.integers(0, 23),
    moment=st.floats(0, 0.999),
    answers=st.booleans(),
    free=st.sampled_from([ON_A_CPU, ON_A_CPU + SENDS]),
)
def test_the_rank_that_stopped_is_found_wherever_it_stopped(
    mesh: Mesh,
    schedule: Schedule,
    micro_batches: int,
    culprit: int,
    moment: float,
    answers: bool,
    free: tuple[Operation, ...],
) -> None:
    run = run_of(mesh, Pipeline.of(schedule, mesh.pipeline_parallel_size, micro_batches))
    culprit %= mesh.world_size
    before_last_step = [
        note for note in run.notes[culprit] if note.step < STEPS and note.operation is not Operation.FINISH
    ]
    at = run.notes[culprit].index(before_last_step[int(moment * len(before_last_step))])
    places = _stand_still(run, culprit, at, free)
    states = _states(run, places, silent=None if answers else culprit)
    found = explain(states, {} if answers else {culprit: NoResponse()}, mesh)
    assert found.roots == (culprit,), found.paragraph
    note = run.notes[culprit][at]
    if answers and note.micro_batch is not None:
        chunk = "" if note.chunk is None else f" of chunk {note.chunk}"
        assert f"micro-batch {note.micro_batch}{chunk} " in found.paragraph, found.paragraph


@pytest.mark.parametrize("culprit", range(4))
def test_a_late_rank_is_found_though_the_hosts_of_the_others_run_ahead_of_their_devices(culprit: int) -> None:
    run = run_of(Mesh(pipeline_parallel_size=2, data_parallel_size=2), Pipeline(micro_batches=4))
    at = next(index for index, note in enumerate(run.notes[culprit]) if note.phase is Phase.DATA and note.step == 2)
    found = explain(_states(run, _stand_still(run, culprit, at, ON_A_DEVICE)), {}, run.mesh)
    assert found.roots == (culprit,), found.paragraph


def _notes(*operations: tuple[Operation, int | None, tuple[int, ...]], phase: Phase = Phase.STEP) -> tuple[Note, ...]:
    return tuple(Note(12.3, 7, 120, phase, *operation) for operation in operations)


def _state(rank: int, *operations: tuple[Operation, int | None, tuple[int, ...]], **changes: Any) -> RankState:
    values = {"rank": rank, "host": "node3", "process": 1, "reason": "", "notes": _notes(*operations)}
    return RankState(**values | changes)


BEGIN = (Operation.BEGIN, None, NOBODY)
PIPELINE = Mesh(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)


def test_it_is_told_like_a_colleague_would() -> None:
    in_data = Note(310.0, 6, 120, Phase.DATA, *BEGIN)
    states = {
        0: _state(0, (Operation.FORWARD, 3, (0, 1))),
        1: _state(1, notes=(in_data,)),
        2: _state(2, (Operation.REDUCE_GRADIENTS, None, (0, 2))),
        3: _state(3, (Operation.RECEIVE_GRADIENT, 3, (7,))),
        4: _state(4, (Operation.OPTIMIZER, None, tuple(range(8)))),
        5: _state(5, (Operation.RECEIVE_ACTIVATION, 3, (1,)), reason="Step 120 has not ended for 312 s."),
        6: _state(6, (Operation.OPTIMIZER, None, tuple(range(8)))),
        7: _state(7, (Operation.REDUCE_GRADIENTS, None, (5, 7))),
    }
    found = explain(states, {}, PIPELINE)
    assert found.roots == (1,)
    assert found.paragraph == (
        "Step 120 has not ended for 312 s. The run waits for rank 1 (stage 0, replica 0, tensor rank 1, on node3), "
        "which has been in the data loader for 310 s. Rank 0 waits in the forward of micro-batch 3 for rank 1; ranks 4 "
        "and 6 wait in the optimizer step for rank 1; rank 5 waits for the activation of micro-batch 3 from rank 1; "
        "rank 2 waits to sum gradients with rank 0; rank 7 waits to sum gradients with rank 5; rank 3 waits for the "
        "gradient of micro-batch 3 from rank 7."
    )


def test_ranks_without_an_answer_are_told_by_host() -> None:
    mesh = Mesh(data_parallel_size=8)
    reduce = (Operation.BACKWARD, 2, tuple(range(8)))
    gone = {rank: NoResponse("node7", "") for rank in (4, 5, 6, 7)} | {1: NoResponse("node3", "its process 77 is dead")}
    found = explain({rank: _state(rank, reduce) for rank in (0, 2, 3)}, gone, mesh)
    assert (found.roots, found.headline) == ((1, 4, 5, 6, 7), "hung")
    assert found.paragraph == (
        "The run waits for rank 1 (replica 1, on node3), which does not answer: its process 77 is dead, and for ranks "
        "4-7 (on node7), which do not answer: stopped, dead, or cut off. Ranks 0 and 2-3 wait in the backward of "
        "micro-batch 2 for ranks 1 and 4-7."
    )


def test_who_died_is_told_first() -> None:
    mesh, state = Mesh(data_parallel_size=4), {0: _state(0, (Operation.REDUCE_GRADIENTS, None, (0, 1, 2, 3)))}
    gone = {3: NoResponse("node7")}
    away = explain(state, gone, mesh, is_lost=True).headline
    assert away == "rank 3 on node7 died, or cannot be reached any more"
    stopped = gone | {2: NoResponse("node2", condition="is alive, but stopped")}
    assert explain(state, stopped, mesh, is_lost=True).headline == away, "rank 2 is known to be alive"
    gone |= {rank: NoResponse(f"node{rank}", is_dead=True) for rank in (1, 2)}
    assert explain(state, gone, mesh).headline == "ranks 1-2 on node1, node2 died"
    # rank 0 has lost its connection to rank 3 in work of its own, and rank 1 waits for what it does not send any more
    left = {0: _state(0, (Operation.FORWARD, 2, NOBODY)), 1: _state(1, (Operation.RECEIVE_ACTIVATION, 2, (0,)))}
    assert explain(left, {3: NoResponse("node7", is_dead=True)}, mesh, is_lost=True).roots == (3,)
    assert explain(left, {3: NoResponse("node7")}, mesh).roots == (0, 3), "without a loss both hold the others up"


def test_when_all_have_come_it_is_the_network() -> None:
    reduce = (Operation.REDUCE_GRADIENTS, None, (0, 1))
    found = explain({rank: _state(rank, reduce) for rank in (0, 1)}, {}, Mesh(data_parallel_size=2))
    assert found.roots == (0, 1)
    assert found.paragraph == (
        "The run waits for ranks 0-1 (on node3), which have been summing gradients with all peers for 12 s. "
        "Nobody is missing there: look at the network and at the devices."
    )


def test_a_circle_is_called_one() -> None:
    receives = (Operation.RECEIVE_GRADIENT, 1, (1,)), (Operation.RECEIVE_ACTIVATION, 2, (0,))
    states = {rank: _state(rank, operation) for rank, operation in enumerate(receives)}
    assert explain(states, {}, Mesh(pipeline_parallel_size=2)).paragraph == (
        "Nobody is free to go on, the ranks wait for each other in a circle. Rank 0 waits for the gradient of "
        "micro-batch 1 from rank 1; rank 1 waits for the activation of micro-batch 2 from rank 0."
    )


def test_a_rank_that_is_busy_elsewhere_is_told_beside_the_one_that_is_waited_for() -> None:
    logging = Note(20.0, 8, 120, Phase.LOGGING, *BEGIN)
    states = {0: _state(0, notes=(logging,)), 1: _state(1, (Operation.LOSS, None, (1, 2)))}
    loading = _state(2, (Operation.LOAD, 1, NOBODY))
    for answers, silences in ((states, {2: NoResponse()}), (states | {2: loading}, {})):
        found = explain(answers, silences, Mesh(data_parallel_size=3))
        assert found.roots == (2,)
        assert found.paragraph.endswith("Rank 1 waits to average the loss with rank 2. Rank 0 is logging.")


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("operation", Operation)
def test_there_are_words_for_a_rank_anywhere_waiting_or_not(operation: Operation, phase: Phase) -> None:
    operations = (operation, PARTNERS.get(operation, operation))
    here = [_state(rank, notes=(Note(1.0, 7, 120, phase, each, 2, (0, 1)),)) for rank, each in enumerate(operations)]
    mesh = Mesh(data_parallel_size=2)
    waiting, together = explain({0: here[0]}, {1: NoResponse()}, mesh), explain(dict(enumerate(here)), {}, mesh)
    assert "Rank 0 waits" in waiting.paragraph and "The run waits for rank" in together.paragraph
    assert "{" not in waiting.paragraph + together.paragraph


def test_a_thousand_ranks_are_told_in_a_paragraph() -> None:
    mesh = Mesh(tensor_parallel_size=8, pipeline_parallel_size=8, data_parallel_size=16)
    run, culprit = run_of(mesh, Pipeline(micro_batches=2), steps=1), 700
    at = next(index for index, note in enumerate(run.notes[culprit]) if note.operation is Operation.BACKWARD)
    states = _states(run, _stand_still(run, culprit, at, ON_A_CPU), silent=culprit)
    found = explain(states, {culprit: NoResponse("node87", "")}, mesh)
    assert found.roots == (culprit,)
    assert len(found.paragraph) < 2500


def test_four_thousand_ranks_in_a_collective_of_all_are_compared_once() -> None:
    mesh = Mesh(data_parallel_size=4096)
    everyone = tuple(range(4096))
    states = {rank: _state(rank, (Operation.OPTIMIZER, None, everyone)) for rank in everyone if rank != 700}
    started = time.process_time()
    found = explain(states, {700: NoResponse("node87", "")}, mesh)
    assert time.process_time() - started < 3  # 0.3 s on a free core; comparing each with each takes 10 s
    assert found.roots == (700,)
    assert "Ranks 0-699 and 701-4095 wait in the optimizer step for rank 700." in found.paragraph


@pytest.mark.parametrize("peers", [NOBODY, (3,), (0, 8, 16), (1, 5, 6, 7, 9), (0, 5), tuple(range(4096))])
def test_what_a_rank_writes_down_is_small_and_read_back_whole(peers: tuple[int, ...]) -> None:
    state = _state(3, BEGIN, *[(Operation.FORWARD, 1, NOBODY)] * 62, (Operation.FORWARD, 2, peers))
    text = state.packed()
    assert len(text) < 4000
    assert RankState.unpacked(text.encode(), 4096) == state


ANSWER = json.loads(_state(3, BEGIN, (Operation.FORWARD, 2, (0, 5))).packed())
TEXT = json.dumps(ANSWER)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "null", '{"peers": [1]}', TEXT[:-9], TEXT.replace('"rank"', '"tank"')),
        "[" * 200_000,
        TEXT.replace('"rank": 3', '"rank": 8'),
        *(TEXT.replace('"process": 1', f'"process": {number}') for number in ("1e999", "-1", "true", "9" * 4000)),
        TEXT.replace('"node3"', r'"\u001b[31m"'),
        TEXT.replace('"reason": ""', r'"reason": "\u202e"'),
        TEXT.replace('"reason": ""', f'"reason": "{"x" * 2000}"'),
        TEXT.replace("12.3", "NaN"),
        TEXT.replace("12.3", "1e300"),
        TEXT.replace("120", "9" * 4000),
        json.dumps(ANSWER | {"state": ANSWER["state"] | {"notes": []}}),
        json.dumps(ANSWER | {"state": ANSWER["state"] | {"notes": ANSWER["state"]["notes"] * 99}}),
        *(
            json.dumps(ANSWER | {"peers": [run]})
            for run in ([0, 10**12, 1], [0, 8, 1], [5, 0, 1], [0, 5, 0], [-1, 5, 1])
        ),
        json.dumps(ANSWER | {"peers": [[0, 7, 1]] * 2}),
    ],
    ids=lambda text: f"{text[:30]} ... {text[-30:]}",
)
def test_what_no_rank_has_written_is_refused(text: str) -> None:
    """Where a group shares the run's folder, its members can write there."""
    with pytest.raises(ValueError):
        RankState.unpacked(text.encode(), 8)


@given(
    st.recursive(st.none() | st.integers() | st.floats() | st.text(max_size=4), st.lists, max_leaves=4),
    st.sampled_from(["rank", "host", "process", "reason", "notes"]) | st.integers(0, 6),
)
def test_any_answer_is_refused_or_explained(value: Any, place: str | int) -> None:
    """A number stands for a field of its last record."""
    answer = json.loads(TEXT)
    holder: Any = answer["state"] if isinstance(place, str) else answer["state"]["notes"][-1]
    holder[place] = value
    with suppress(ValueError):
        state = RankState.unpacked(json.dumps(answer).encode(), 8)
        assert explain({state.rank: state}, {}, PIPELINE).paragraph.isprintable()


def test_peers_are_the_ranks_that_a_group_of_torch_would_have() -> None:
    peers = Peers.of(PIPELINE, 5)  # stage 1, replica 0, tensor rank 1
    assert replace(peers, everyone=NOBODY) == Peers(
        everyone=NOBODY, tensor=(4, 5), layer=(4, 5), data=(5, 7), stage=(4, 5, 6, 7), experts=(5,)
    )
    assert replace(Peers.of(PIPELINE, 1), everyone=NOBODY) == Peers(
        everyone=NOBODY, tensor=(0, 1), layer=(0, 1), data=(1, 3), stage=(0, 1, 2, 3), experts=(1,)
    )
    sharing = Peers.of(Mesh(2, 1, 2, context_parallel_size=2), 6)  # replica 1, context rank 1, tensor rank 0
    assert (sharing.tensor, sharing.layer, sharing.data) == ((6, 7), (4, 5, 6, 7), (0, 2, 4, 6))
    assert Peers.of(Mesh(2, 1, 4, expert_parallel_size=2), 6).experts == (4, 6)
