"""The messages between pipeline stages in one rank's records, and how long it waited for a neighbour.

A rank that is blocked in a message waits for its neighbour as long as that one has not come to it, and for the transfer
from then on. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from megalite.monitor.steps.timeline import TimedNote
from megalite.tracing.activity import Note, Operation, Phase

SENDS = {Operation.SEND_ACTIVATION: "activation", Operation.SEND_GRADIENT: "gradient"}
RECEPTIONS = {Operation.RECEIVE_ACTIVATION: "activation", Operation.RECEIVE_GRADIENT: "gradient"}
AWAITED_SENDS = {Operation.AWAIT_ACTIVATION: "activation", Operation.AWAIT_GRADIENT: "gradient"}


class MessageKey(NamedTuple):
    """A message of one pipeline and step."""

    kind: str  # activation or gradient
    position: int  # in the model, of the chunk that uses it
    micro_batch: int  # from 1


class Interval(NamedTuple):
    """Times on one rank's clock, in seconds."""

    start: float
    end: float


@dataclass
class Messages:
    """The messages of one rank in the training step of its window, without those of evaluations."""

    sent: dict[MessageKey, float] = field(default_factory=dict)  # when it began to send
    received: dict[MessageKey, Interval] = field(default_factory=dict)  # blocked in the reception
    awaited: dict[MessageKey, Interval] = field(default_factory=dict)  # blocked until its own send had ended

    @classmethod
    def of(cls, spans: Iterable[TimedNote], stage: int) -> Messages:
        """Returns the messages in the records of a rank of `stage`."""
        messages = cls()
        for start, end, note in spans:
            if note.phase is not Phase.STEP or (key := key_of(note, stage)) is None:
                continue
            if note.operation in SENDS:
                messages.sent[key] = start
            elif note.operation in RECEPTIONS:
                messages.received[key] = Interval(start, end)
            else:
                messages.awaited[key] = Interval(start, end)
        return messages


def key_of(note: Note, stage: int) -> MessageKey | None:
    """Returns the message that a note of a rank of `stage` is about; None if it is about none.

    Where each stage has one chunk a note names none: activations are used by the next stage, gradients by the one
    before.
    """
    for operations, is_own in ((RECEPTIONS, True), (SENDS, False), (AWAITED_SENDS, False)):
        if (kind := operations.get(note.operation)) is not None and note.micro_batch is not None:
            position = note.chunk
            if position is None:
                position = stage if is_own else stage + (1 if kind == "activation" else -1)
            return MessageKey(kind, position, note.micro_batch)
    return None


def waited_to_receive(blocked: Interval, sent: float) -> float:
    """Returns how much of the time blocked in a reception went by before its sender began to send, in seconds."""
    return min(max(sent - blocked.start, 0.0), blocked.end - blocked.start)


def waited_to_send(blocked: Interval, received: Interval) -> float:
    """Returns how much of the time blocked in a send went by while its receiver was not blocked in the reception: the
    transfer is where both are."""
    transfer = max(0.0, min(blocked.end, received.end) - max(blocked.start, received.start))
    return blocked.end - blocked.start - transfer
