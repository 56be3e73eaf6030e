"""The passes of micro-batches through the chunks of a pipeline stage, as a rank recorded them. No torch."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from megalite.monitor.steps.timeline import RankTimeline
from megalite.schedules.passes import PassKind
from megalite.tracing.activity import Operation, Phase

KINDS = {
    Operation.FORWARD: PassKind.FORWARD,
    Operation.BACKWARD: PassKind.BACKWARD,
    Operation.WEIGHT_GRADIENT: PassKind.WEIGHT_GRADIENT,
}


class TimedPass(NamedTuple):
    """A pass with its begin and end on the clock of its rank."""

    kind: PassKind
    position: int  # in the model, of its chunk
    micro_batch: int  # from 0
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def passes_of(timeline: RankTimeline) -> list[TimedPass]:
    """Returns the passes of a rank's training step in the order in which they began.

    A reduction of gradients that begins within a pass belongs to it. Raises ValueError, with a sentence, where the
    records are not those of one whole step.
    """
    times: dict[tuple[PassKind, int, int], tuple[float, float]] = {}
    for span in timeline.spans():
        note = span.note
        kind = KINDS.get(note.operation) if note.phase is Phase.STEP else None
        if kind is not None and note.micro_batch is not None:
            position = timeline.owner.stage if note.chunk is None else note.chunk
            start, _ = times.get(key := (kind, position, note.micro_batch - 1), (span.start, span.end))
            times[key] = start, span.end
    split = {(position, number) for kind, position, number in times if kind is PassKind.WEIGHT_GRADIENT}
    passes = [
        TimedPass(
            PassKind.INPUT_GRADIENT if kind is PassKind.BACKWARD and (position, number) in split else kind,
            position,
            number,
            start,
            end,
        )
        for (kind, position, number), (start, end) in times.items()
    ]
    _check_whole(timeline, passes)
    return passes


def _check_whole(timeline: RankTimeline, passes: list[TimedPass]) -> None:
    owner = timeline.owner
    count = Counter(each.kind for each in passes)
    backwards = count[PassKind.BACKWARD] + count[PassKind.INPUT_GRADIENT]
    expected = owner.micro_batches * owner.chunks
    if not count[PassKind.FORWARD] == backwards == expected:
        raise ValueError(
            f"rank {owner.rank} recorded {count[PassKind.FORWARD]} forward and {backwards} backward passes of step "
            f"{timeline.step}, instead of {expected} each: its record is not whole"
        )
