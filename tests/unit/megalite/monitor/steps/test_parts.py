"""Parts of a step from made records: they add up, and each second is where it belongs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megalite.monitor.steps.messages import Interval, MessageKey, Messages, waited_to_receive, waited_to_send
from megalite.monitor.steps.parts import PARTS, communication_share, parts_of
from megalite.monitor.steps.timeline import spans
from megalite.tracing.activity import Note, Operation, Phase
from megalite.tracing.tape import Collective


def note(time: float, operation: Operation, phase: Phase = Phase.STEP, **fields: Any) -> Note:
    known = {"phase_number": 1, "step": 1, "micro_batch": 1, "peers": (), "chunk": None}
    return Note(time=time, phase=phase, operation=operation, **(known | fields))


WINDOW = [
    note(0.0, Operation.BEGIN, Phase.LOGGING),
    note(1.0, Operation.MEET, Phase.LOGGING),
    note(3.0, Operation.BEGIN, Phase.CHECKPOINT),
    note(6.0, Operation.BEGIN, Phase.DATA),
    note(10.0, Operation.BEGIN),
    note(11.0, Operation.COUNT_TOKENS),
    note(12.0, Operation.LOAD),
    note(14.0, Operation.FORWARD),
    note(20.0, Operation.SEND_ACTIVATION),
    note(21.0, Operation.RECEIVE_GRADIENT),
    note(25.0, Operation.BACKWARD),
    note(35.0, Operation.WEIGHT_GRADIENT),
    note(38.0, Operation.REDUCE_TIED_GRADIENTS),
    note(39.0, Operation.REDUCE_GRADIENTS),
    note(41.0, Operation.OPTIMIZER),
    note(46.0, Operation.UNITE_TIED_WEIGHTS),
    note(47.0, Operation.LOSS),
    note(48.0, Operation.FINISH),
    note(49.0, Operation.BEGIN, Phase.EVALUATION),
    note(50.0, Operation.FORWARD, Phase.EVALUATION),
    note(55.0, Operation.BEGIN, Phase.SELF_CHECK),
]
COLLECTIVES = [
    Collective(1.0, 1.5, "all", "all_reduce", 12),  # in a meeting, which it is anyway
    Collective(14.0, 2.0, "tensor", "all_reduce", 10),  # begins with its span
    Collective(19.0, 0.5, "data", "all_gather", 10),  # of weights
    Collective(30.0, 0.5, "context", "reduce_scatter", 10),
    Collective(32.0, 0.25, "expert", "all_to_all", 10),
    Collective(33.0, 0.25, "expert_data", "reduce_scatter", 10),
    Collective(34.0, 1.5, "data", "reduce_scatter", 10),  # ends after its span: only what is inside
    Collective(41.5, 2.0, "all", "all_reduce", 10),  # of the norm
    Collective(44.0, 1.0, "data", "all_gather", 10),
    Collective(51.0, 1.0, "tensor", "all_reduce", 10),  # of an evaluation
]


def test_each_second_of_a_step_is_in_one_part() -> None:
    seconds = parts_of(list(spans(WINDOW, 60.0)), COLLECTIVES, waited=3.0)
    assert seconds == pytest.approx(
        {
            "data": 4.0,
            "collate_to_device": 2.0,
            "forward": 6.0 - 2.5,
            "backward": 13.0 - 2.0,
            "loss": 2.0,
            "tensor_collectives": 2.0,
            "context_collectives": 0.5,
            "expert_collectives": 0.25,
            "pipeline_wait": 3.0,
            "pipeline_transfer": 2.0,
            "gradient_sync": 3.0 + 1.25,
            "optimizer": 5.0 - 3.0,
            "weights_sync": 1.0 + 0.5 + 1.0,
            "evaluation": 6.0,
            "self_check": 5.0,
            "checkpoint": 3.0,
            "logging": 1.0,
            "meeting": 2.0 + 2.0,
            "other": 2.0,
        }
    )
    assert sum(seconds.values()) == pytest.approx(60.0, abs=1e-12)
    assert list(seconds) == list(PARTS)
    assert communication_share(seconds) == pytest.approx((2.0 + 0.5 + 0.25 + 2.0 + 4.25 + 2.5 + 4.0) / 60.0)


def test_collectives_of_several_streams_take_no_more_than_what_they_happen_in() -> None:
    """On a GPU some run beside each other, and a part would become negative."""
    window = [note(0.0, Operation.FORWARD, Phase.STEP), note(10.0, Operation.BEGIN, Phase.LOGGING)]
    both = [Collective(1.0, 8.0, "tensor", "all_reduce", 1), Collective(2.0, 8.0, "data", "all_gather", 1)]
    seconds = parts_of(list(spans(window, 11.0)), both)
    assert (seconds["forward"], seconds["tensor_collectives"], seconds["weights_sync"]) == (0.0, 8.0, 2.0)


def test_parts_add_up_whatever_the_records_are() -> None:
    draw = random.Random()
    for _ in range(50):
        times = sorted(draw.uniform(0, 10) for _ in range(30))
        notes = [note(time, draw.choice(list(Operation)), draw.choice(list(Phase))) for time in times]
        ended = 10 + draw.random()
        collectives = []
        at = 0.0
        while (at := at + draw.uniform(0, 1)) < ended:  # one after the other, as on one thread
            seconds = draw.uniform(0, 0.3)
            axis, operation = draw.choice(["tensor", "data", "all", "tied"]), draw.choice(["all_gather", "send"])
            collectives.append(Collective(at, seconds, axis, operation, 1))
            at += seconds
        found = parts_of(list(spans(notes, ended)), collectives, waited=draw.uniform(0, 20))
        assert sum(found.values()) == pytest.approx(ended - times[0], abs=1e-9)
        assert min(found.values()) >= -1e-9


def test_messages_are_those_of_the_training_step_by_the_chunk_that_uses_them() -> None:
    notes = [
        note(0.0, Operation.SEND_ACTIVATION),
        note(1.0, Operation.RECEIVE_GRADIENT),
        note(4.0, Operation.AWAIT_ACTIVATION),
        note(6.0, Operation.RECEIVE_ACTIVATION, micro_batch=2),
        note(7.0, Operation.SEND_GRADIENT, micro_batch=2),
        note(8.0, Operation.SEND_GRADIENT, chunk=5),
        note(9.0, Operation.SEND_ACTIVATION, Phase.EVALUATION, micro_batch=7),
    ]
    assert Messages.of(spans(notes, 10.0), stage=2) == Messages(
        sent={
            MessageKey("activation", 3, 1): 0.0,
            MessageKey("gradient", 1, 2): 7.0,
            MessageKey("gradient", 5, 1): 8.0,
        },
        received={MessageKey("gradient", 2, 1): Interval(1.0, 4.0), MessageKey("activation", 2, 2): Interval(6.0, 7.0)},
        awaited={MessageKey("activation", 3, 1): Interval(4.0, 6.0)},
    )


@pytest.mark.parametrize(
    ("sent", "waited"), [(0.0, 0.0), (2.0, 0.0), (3.5, 1.5), (5.0, 3.0), (9.0, 3.0)], ids=lambda value: str(value)
)
def test_a_reception_waits_until_its_sender_begins(sent: float, waited: float) -> None:
    assert waited_to_receive(Interval(2.0, 5.0), sent) == waited


@pytest.mark.parametrize(
    ("received", "waited"),
    [((3.0, 5.0), 1.0), ((0.0, 4.0), 1.0), ((0.0, 1.0), 3.0), ((2.5, 3.0), 2.5), ((0.0, 9.0), 0.0)],
)
def test_a_send_waits_as_long_as_its_receiver_is_elsewhere(received: tuple[float, float], waited: float) -> None:
    assert waited_to_send(Interval(2.0, 5.0), Interval(*received)) == waited
