"""One stage's part of an optimizer step: its passes, and the messages that it receives and sends between them.

Messages from one stage to another arrive in the order in which they were sent. So a stage begins to receive in the
order of the sender's table, which it knows, and no message needs a tag. A stage waits for what a pass needs right
before it; for its sends at the end of the step, and for the oldest ones earlier where more are on their way than the
model has chunks.

All stages begin their sends and receptions in one common order: that in which the messages are ready if every pass
takes a unit of time and messages none. The first message that is not through yet can then always be sent: what it
depends on came before it, and both its ends have begun it, or will without waiting for anything behind it. So a step
ends however few communicators stages share, even with one for all messages, and wherever a stage waits for sends
that it has begun before; `deadlock_check.py` checks it. No torch.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from megalite.config.rules.pipeline import FOLDED, SPLITS_BACKWARD
from megalite.schedules.passes import PassKind, Task
from megalite.schedules.simulation import PipelineTimes, run_orders
from megalite.schedules.tables import Schedule, placement, positions_by_stage, tasks_of


class MessageKind(enum.StrEnum):
    """The two tensors that stages exchange."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Message(NamedTuple):
    """A tensor on its way from one stage to another."""

    kind: MessageKind
    source: int
    target: int
    position: int  # of the chunk that uses it
    micro_batch: int

    def __str__(self) -> str:
        return f"the {self.kind} of micro-batch {self.micro_batch} for position {self.position}"


class Compute(NamedTuple):
    """A pass of a micro-batch through the chunk at a position."""

    kind: PassKind
    position: int
    micro_batch: int
    needs: Message | None  # received before

    def __str__(self) -> str:
        return f"the {self.kind} of micro-batch {self.micro_batch} at position {self.position}"


class Receive(NamedTuple):
    """The begin of a reception, for which nobody waits yet."""

    message: Message


class Send(NamedTuple):
    """The begin of a transmission, which no pass waits for; many later, the stage waits before it begins another."""

    message: Message


Program = tuple[Compute | Receive | Send, ...]


def training_programs(schedule: Schedule, stages: int, micro_batches: int, chunks: int = 1) -> tuple[Program, ...]:
    """Returns the program of each stage for one optimizer step.

    Where a schedule splits some backwards, all are: the gradient of the input is sent before that of the weights is
    computed.
    """
    orders = [tasks_of(schedule, stages, stage, micro_batches, chunks) for stage in range(stages)]
    if schedule in SPLITS_BACKWARD:
        orders = [[part for task in order for part in _parts(task)] for order in orders]
    return programs_of(orders, placement(schedule, stages, chunks))


def _parts(task: Task) -> list[Task]:
    if task.kind is not PassKind.BACKWARD:
        return [task]
    return [task._replace(kind=kind) for kind in (PassKind.INPUT_GRADIENT, PassKind.WEIGHT_GRADIENT)]


def forward_programs(schedule: Schedule, stages: int, micro_batches: int, chunks: int = 1) -> tuple[Program, ...]:
    """Returns the program of each stage for forward passes alone, of any number of micro-batches.

    Micro-batches enter as soon as the first stage has time for them beside those that come back to it: in groups of
    `stages`, as in interleaved 1F1B, or in every other unit of time where the model is folded.
    """
    where = placement(schedule, stages, chunks)

    def begin(number: int) -> int:
        return 2 * number if schedule in FOLDED else number // stages * stages * chunks + number % stages

    orders = []
    for positions in positions_by_stage(where):
        passes = [(begin(n) + at, n, chunk) for n in range(micro_batches) for chunk, at in enumerate(positions)]
        orders.append([Task(PassKind.FORWARD, number, chunk) for _, number, chunk in sorted(passes)])
    return programs_of(orders, where)


def programs_of(orders: Sequence[Sequence[Task]], where: Sequence[int]) -> tuple[Program, ...]:
    """Returns the program of each stage for its order of passes; `where` names the stage of each position of the model.

    Raises ValueError if stages wait for each other forever.
    """
    stages, chunks = len(orders), len(where) // len(orders)
    timed = run_orders(orders, where, PipelineTimes([chunks] * stages, [2 * chunks] * stages))
    passes = [
        [_pass(where, positions[task.chunk], task) for task in order]
        for order, positions in zip(orders, positions_by_stage(where), strict=True)
    ]
    results = [[_result(where, work) for work in order] for order in passes]
    ready = sorted(
        (work.end_s, stage, result)
        for stage in range(stages)
        for work, result in zip(timed[stage], results[stage], strict=True)
        if result is not None
    )
    place_of = {message: place for place, (_, _, message) in enumerate(ready)}
    incoming: list[list[Message]] = [[] for _ in orders]
    for message in place_of:
        incoming[message.target].append(message)
    return tuple(_program(*each, place_of) for each in zip(passes, results, incoming, strict=True))


def _pass(where: Sequence[int], position: int, task: Task) -> Compute:
    """Adds to a task what it needs from another stage: forwards from the position before, gradients from the next."""
    needs = None
    if task.kind is PassKind.FORWARD:
        needs = _message(MessageKind.ACTIVATION, where, position - 1, position, task.micro_batch)
    elif task.kind is not PassKind.WEIGHT_GRADIENT:
        needs = _message(MessageKind.GRADIENT, where, position + 1, position, task.micro_batch)
    return Compute(task.kind, position, task.micro_batch, needs)


def _result(where: Sequence[int], work: Compute) -> Message | None:
    """Returns what a pass sends to another stage, if anything."""
    if work.kind is PassKind.FORWARD:
        return _message(MessageKind.ACTIVATION, where, work.position, work.position + 1, work.micro_batch)
    if work.kind is PassKind.WEIGHT_GRADIENT:
        return None
    return _message(MessageKind.GRADIENT, where, work.position, work.position - 1, work.micro_batch)


def _message(kind: MessageKind, where: Sequence[int], begin: int, end: int, micro_batch: int) -> Message | None:
    """Returns the message from the chunk at position `begin` to the one at `end`; None if none is needed."""
    exists = min(begin, end) >= 0 and max(begin, end) < len(where)
    return Message(kind, where[begin], where[end], end, micro_batch) if exists and where[begin] != where[end] else None


def _program(
    passes: Sequence[Compute],
    results: Sequence[Message | None],
    incoming: Sequence[Message],
    place_of: dict[Message, int],
) -> Program:
    """Puts each pass between the receptions that it needs and its result's transmission.

    What the next pass needs begins to arrive before this pass, unless it comes after this pass's result in the common
    order of all messages.
    """
    # from the last pass to the first: the place of its result or the next one, and of what the next pass needs
    next_results: list[float] = []
    next_needs: list[float] = []
    next_result, next_need = math.inf, -math.inf
    for work, result in zip(reversed(passes), reversed(results), strict=True):
        next_result = next_result if result is None else place_of[result]
        next_results.append(next_result)
        next_needs.append(next_need)
        next_need = next_need if work.needs is None else place_of[work.needs]

    program: list[Compute | Receive | Send] = []
    receptions = deque((place_of[message], message) for message in incoming)

    def begin_to_receive(last: float) -> None:
        """Begins the receptions up to a place in the common order."""
        while receptions and receptions[0][0] <= last:
            program.append(Receive(receptions.popleft()[1]))

    for work, result, sends, ahead in zip(passes, results, reversed(next_results), reversed(next_needs), strict=True):
        if work.needs is not None:
            begin_to_receive(place_of[work.needs])
        if ahead < sends:
            begin_to_receive(ahead)
        program.append(work)
        if result is not None:
            begin_to_receive(sends)
            program.append(Send(result))
    return tuple(program)
