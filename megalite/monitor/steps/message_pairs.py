"""Both ends of the messages between pipeline stages, once the timelines of all ranks are on one clock. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megalite.monitor.steps.messages import (
    RECEPTIONS,
    SENDS,
    Interval,
    MessageKey,
    Messages,
    key_of,
    waited_to_receive,
    waited_to_send,
)
from megalite.monitor.steps.timeline import RankTimeline, TimedNote
from megalite.tracing.activity import Phase


class MessagePair(NamedTuple):
    """A message with both of its ends."""

    key: MessageKey
    phase: Phase  # of the step or of an evaluation
    source: int  # rank
    target: int  # rank
    sending: TimedNote  # in which its source began to send
    receiving: TimedNote  # in which its target was blocked until it was there


class _End(NamedTuple):
    rank: int
    span: TimedNote


_Place = tuple[int, int, int, MessageKey]  # replica, slice of tensor parallelism, number of the phase, message


def message_pairs(timelines: Mapping[int, RankTimeline]) -> Iterator[MessagePair]:
    """Yields all messages of which both ends are known, those of evaluations too.

    Messages of one phase that have the same key, such as those of several evaluations in it, arrive in the order in
    which they were sent.
    """
    sent: dict[_Place, list[_End]] = defaultdict(list)
    received: dict[_Place, list[_End]] = defaultdict(list)
    for rank, timeline in timelines.items():
        owner = timeline.owner
        for span in timeline.spans():
            operation = span.note.operation
            if operation in SENDS or operation in RECEPTIONS:
                key = key_of(span.note, owner.stage)
                if key is not None:
                    ends = sent if operation in SENDS else received
                    ends[owner.data, owner.tensor, span.note.phase_number, key].append(_End(rank, span))
    for place, ends_there in received.items():
        for source, target in zip(sent.get(place, ()), ends_there, strict=False):
            yield MessagePair(place[-1], source.span.note.phase, source.rank, target.rank, source.span, target.span)


def whole_pipelines(timelines: Mapping[int, RankTimeline]) -> dict[int, RankTimeline]:
    """Returns the timelines of ranks whose pipeline has one of each stage: of the others' messages one end is unknown,
    so that waiting could not be told from transfer."""
    stages: dict[tuple[int, int], set[int]] = defaultdict(set)
    for timeline in timelines.values():
        owner = timeline.owner
        stages[owner.data, owner.tensor].add(owner.stage)
    return {
        rank: timeline
        for rank, timeline in timelines.items()
        if len(stages[timeline.owner.data, timeline.owner.tensor]) == timeline.owner.pipeline_parallel_size
    }


def transfers(timelines: Mapping[int, RankTimeline]) -> dict[int, list[Interval]]:
    """Returns when each rank began a message of the training step or was blocked in one that was on its way, without
    the time before its neighbour had come to it."""
    found: dict[int, list[Interval]] = {
        rank: [
            Interval(span.start, span.end)
            for span in timeline.spans()
            if span.note.phase is Phase.STEP and span.note.operation in SENDS
        ]
        for rank, timeline in timelines.items()
    }
    for rank, blocked, waited in _blocked(timelines):
        found[rank].append(Interval(blocked.start + waited, blocked.end))
    return found


def waited_s(timelines: Mapping[int, RankTimeline]) -> dict[int, float]:
    """Returns for how many seconds each rank was blocked in messages of the training step to which its neighbour had
    not come yet."""
    seconds = dict.fromkeys(timelines, 0.0)
    for rank, _, waited in _blocked(timelines):
        seconds[rank] += waited
    return seconds


def _blocked(timelines: Mapping[int, RankTimeline]) -> Iterator[tuple[int, Interval, float]]:
    """Yields when a rank was blocked in a message whose other end is known, and how much of that was waiting."""
    by_pipeline: dict[tuple[int, int], dict[int, Messages]] = defaultdict(dict)
    for rank, timeline in timelines.items():
        owner = timeline.owner
        by_pipeline[owner.data, owner.tensor][rank] = Messages.of(timeline.spans(), owner.stage)
    for ranks in by_pipeline.values():
        sent = {key: time for messages in ranks.values() for key, time in messages.sent.items()}
        received = {key: blocked for messages in ranks.values() for key, blocked in messages.received.items()}
        for rank, messages in ranks.items():
            for key, blocked in messages.received.items():
                if key in sent:
                    yield rank, blocked, waited_to_receive(blocked, sent[key])
            for key, blocked in messages.awaited.items():
                if key in received:
                    yield rank, blocked, waited_to_send(blocked, received[key])
