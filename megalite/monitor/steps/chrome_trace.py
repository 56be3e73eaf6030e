"""A step on all ranks as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

Each rank is a process: what it does is one track, and its collectives are another, or more where some overlap. Arrows
lead from the send of a pipeline message to its reception. Times are in microseconds from the first record on. Format:
"Trace Event Format" by Google. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megalite.monitor.steps.message_pairs import message_pairs
from megalite.monitor.steps.parts import part_of
from megalite.monitor.steps.timeline import RankTimeline, TimedNote
from megalite.tracing.activity import Operation, Phase

NOTES, COLLECTIVES = 1, 2  # tracks of a rank, whose process has its number
EDGES = (Operation.BEGIN, Operation.FINISH)  # say nothing without their phase
TraceEvent = dict[str, Any]


@dataclass
class ChromeTrace:
    """The events of a trace, and what had to be left out."""

    events: list[TraceEvent] = field(default_factory=list)
    arrows: int = 0
    left_out: int = 0  # arrows that would lead backwards, because clocks of machines differ by some milliseconds
    most_s: float = 0.0  # by which one of them would


def chrome_trace(steps: Sequence[Mapping[int, RankTimeline]], events: Sequence[Mapping[str, Any]] = ()) -> ChromeTrace:
    """Returns the trace of steps, each by rank; all timelines are on one clock.

    `events` are entries of events.jsonl with a `time` on that clock.
    """
    trace = ChromeTrace()
    zero_s = min(timeline.began for step in steps for timeline in step.values())
    owners = {rank: timeline.owner for step in steps for rank, timeline in step.items()}
    in_order = sorted(owners.values(), key=lambda owner: (owner.stage, owner.data, owner.tensor, owner.rank))
    for place, owner in enumerate(in_order):
        name = f"stage {owner.stage}, rank {owner.rank} ({owner.host})"
        trace.events += [
            _about("process_name", owner.rank, name=name),
            _about("process_sort_index", owner.rank, sort_index=place + 1),
            _about("thread_name", owner.rank, NOTES, name="steps"),
        ]
    for step in steps:
        for timeline in step.values():
            trace.events += _of_rank(timeline, zero_s)
        _add_arrows(trace, step, zero_s)
    lanes = {(each["pid"], each["tid"]) for each in trace.events if each["ph"] == "X" and each["tid"] != NOTES}
    for process, track in sorted(lanes):
        name = "collectives" + (f" {track - COLLECTIVES + 1}" if track > COLLECTIVES else "")
        trace.events.append(_about("thread_name", process, track, name=name))
    if events:
        process = max(owners) + 1
        trace.events += [
            _about("process_name", process, name="events"),
            _about("process_sort_index", process, sort_index=0),
        ]
        trace.events += [_instant(event, process, zero_s) for event in events]
    return trace


def _of_rank(timeline: RankTimeline, zero_s: float) -> Iterator[TraceEvent]:
    process = timeline.owner.rank
    for span in timeline.spans():
        note = span.note
        facts = {"step": timeline.step, "phase": str(note.phase), "part": part_of(span)}
        optional = {"micro_batch": note.micro_batch, "chunk": note.chunk, "may_wait_for": list(note.peers) or None}
        facts |= {name: value for name, value in optional.items() if value is not None}
        yield _span(process, NOTES, _name(span), str(note.phase), (span.start, span.end), zero_s, facts)
    free_s: dict[int, float] = {}  # by track of collectives
    for each in sorted(timeline.collectives):
        end_s = each.began + each.seconds
        track = next((number for number, time_s in free_s.items() if time_s <= each.began), COLLECTIVES + len(free_s))
        free_s[track] = end_s
        name = f"{each.axis} {each.operation}"
        facts = {"step": timeline.step, "axis": each.axis, "bytes": each.size}
        yield _span(process, track, name, each.axis, (each.began, end_s), zero_s, facts)


def _name(span: TimedNote) -> str:
    """Returns the operation with its micro-batch, and the phase if it is not the training step."""
    note = span.note
    names = [str(note.phase)] if note.phase is not Phase.STEP or note.operation in EDGES else []
    if note.operation is not Operation.BEGIN:
        names.append(str(note.operation))
    number = "" if note.micro_batch is None else f" {note.micro_batch}"
    return ": ".join(names).replace("_", " ") + number


def _add_arrows(trace: ChromeTrace, step: Mapping[int, RankTimeline], zero_s: float) -> None:
    for pair in message_pairs(step):
        begin, end = _nanoseconds(pair.sending.start, zero_s), _nanoseconds(pair.receiving.end, zero_s)
        if end < begin - 1:  # a nanosecond is rounding
            trace.left_out += 1
            trace.most_s = max(trace.most_s, (begin - end) / 1e9)
            continue
        # it belongs to the span around its end, so that is before the next span begins
        end = max(begin, _nanoseconds(pair.receiving.start, zero_s), end - 1)
        trace.arrows += 1
        common = {"cat": "message", "name": pair.key.kind, "id": trace.arrows, "tid": NOTES}
        facts = {"phase": str(pair.phase), "micro_batch": pair.key.micro_batch, "position": pair.key.position}
        trace.events += [
            common | {"ph": "s", "pid": pair.source, "ts": begin / 1000, "args": facts},
            common | {"ph": "f", "bp": "e", "pid": pair.target, "ts": end / 1000, "args": facts},
        ]


def _span(
    process: int,
    track: int,
    name: str,
    category: str,
    times_s: tuple[float, float],
    zero_s: float,
    facts: Mapping[str, Any],
) -> TraceEvent:
    # ends are rounded, not durations, so that one span ends where the next begins
    begin, end = (_nanoseconds(time_s, zero_s) for time_s in times_s)
    where = {"pid": process, "tid": track, "ts": begin / 1000, "dur": max(0, end - begin) / 1000}
    return {"ph": "X", "name": name, "cat": category, **where, "args": facts}


def _instant(event: Mapping[str, Any], process: int, zero_s: float) -> TraceEvent:
    facts = {name: str(value) for name, value in event.items() if name not in ("time", "event")}
    at = {"pid": process, "tid": NOTES, "ts": _nanoseconds(event["time"], zero_s) / 1000}
    return {"ph": "i", "s": "g", "name": event["event"], "cat": "event", **at, "args": facts}


def _about(what: str, process: int, track: int = NOTES, **facts: Any) -> TraceEvent:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": facts}


def _nanoseconds(time_s: float, zero_s: float) -> int:
    return round((time_s - zero_s) * 1e9)
