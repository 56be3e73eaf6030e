"""Everything that a rank does in a step: its records of activity and its collectives, with their times.

On a CPU times are the host's. On an accelerator the host runs ahead, so each moment is an event on the current stream,
which is read once the host has waited for the device anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from time import monotonic
from typing import Any, NamedTuple, Protocol

LONGEST_TAPE = 20_000  # records, and as many collectives: 1 % of a step that has that many, some MB
PATIENCE_S = 0.01  # an event is seen a little later than it takes place, also on a device that has nothing to do
Entry = tuple[Any, ...]  # the fields of a `Note` (activity.py), the first of them its time


class Event(Protocol):
    """A moment on a stream, as `torch.cuda.Event(enable_timing=True)`."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end_event: Any) -> float: ...  # ms


class Collective(NamedTuple):
    """One call of a communication function of torch.distributed."""

    began: float  # time.monotonic
    seconds: float  # that the rank waited for it, or took to begin it if it is asynchronous
    axis: str  # tensor, context, data, pipeline, tied or all: the ranks that take part
    operation: str  # all_reduce, reduce_scatter, all_gather, broadcast, send, receive or another of torch's names
    size: int  # bytes that it is handed, as megalite/planner/cost/communication_volumes.py counts them
    is_wait: bool = False  # for one that is asynchronous, whose call and bytes are counted where it began


class Recorded(NamedTuple):
    """Contents of a tape; times are on the scale of time.monotonic."""

    entries: list[Entry]
    collectives: list[Collective]
    is_cut: bool  # there was more than fits


class DeviceClock:
    """Events from a pool, and their times.

    An event costs the host a microsecond or two and the device nothing. `seconds` needs no synchronisation: it is asked
    after the host has waited for the device.
    """

    def __init__(self, new_event: Callable[[], Event]) -> None:
        self._new_event = new_event
        self._pool: list[Event] = []
        self._base, self._base_s = self.mark(), monotonic()

    def mark(self) -> Event:
        """Returns an event at this moment of the current stream."""
        event = self._pool.pop() if self._pool else self._new_event()
        event.record()
        return event

    def seconds(self, events: Sequence[Event]) -> list[float] | None:
        """Returns when events took place, on the scale of time.monotonic; None if the device has not reached them.

        They may be of several streams.
        """
        patience = monotonic() + PATIENCE_S
        for event in reversed(events):
            while not event.query():
                if monotonic() > patience:
                    return None
        return [self._base_s + self._base.elapsed_time(event) / 1000 for event in events]

    def take_back(self, events: Iterable[Event]) -> None:
        """Takes back events that nobody asks for any more."""
        self._pool += [event for event in events if event is not self._base]

    def restart(self) -> None:
        """Measures later events from this moment, in which the device must be idle."""
        self._pool.append(self._base)
        self._base, self._base_s = self.mark(), monotonic()

    def go_on_from(self, event: Event, seconds: float) -> None:
        """Measures later events from one that took place at `seconds`, while the device works."""
        self._pool.append(self._base)
        self._base, self._base_s = event, seconds


_Marked = tuple[Any, ...]  # the fields of a `Collective`, its begin and its end as `Tape.mark` returns them


class _TapeWindow(NamedTuple):
    """The records and collectives up to a `Tape.cut`."""

    entries: list[Entry]
    events: list[Event]  # of the entries, on a device
    collectives: list[_Marked]
    is_cut: bool


class Tape:
    """The records and collectives of one rank since they were last taken; written by the threads of a step."""

    def __init__(self, clock: DeviceClock | None = None) -> None:
        """Without a clock the host's is used."""
        self._clock = clock
        self._entries: list[Entry] = []
        self._entry_events: list[Event] = []
        self._began: float | None = None  # the first record's time, as the last one of the tape before
        self._collectives: list[_Marked] = []
        self._is_cut = False
        self._windows: deque[_TapeWindow] = deque()  # that were cut, and not yet taken

    def add(self, entry: Entry) -> None:
        """Adds a record; on a full tape it replaces the last one, so that the tape ends when the step does."""
        if len(self._entries) >= LONGEST_TAPE:
            self._is_cut = True
            self._entries[-1] = entry
            if self._clock is not None:
                self._entry_events[-1].record()
            return
        self._entries.append(entry)
        if self._clock is not None:
            self._entry_events.append(self._clock.mark())

    def mark(self) -> Any:
        """Returns this moment, for `add_collective`; None on a full tape."""
        if len(self._collectives) >= LONGEST_TAPE:
            self._is_cut = True
            return None
        return monotonic() if self._clock is None else self._clock.mark()

    def add_collective(self, began: Any, axis: str, operation: str, size: int, *, is_wait: bool = False) -> None:
        """Adds a collective that began at a `mark` and has just returned."""
        if began is not None and (ended := self.mark()) is not None:
            self._collectives.append((began, ended, axis, operation, size, is_wait))

    def cut(self) -> None:
        """Ends a window with the last record, which stays as the first one of what comes."""
        self._windows.append(_TapeWindow(self._entries, self._entry_events, self._collectives, self._is_cut))
        self._entries, self._entry_events = self._entries[-1:], self._entry_events[-1:]
        self._collectives, self._is_cut = [], False

    def take(self) -> Recorded:
        """Returns the oldest window that was cut, or else what was recorded before the last record, and forgets it.

        The time of its last record is its end. The host must have waited for the device to reach that.
        """
        if not self._windows:
            self.cut()
        entries, events, collectives, is_cut = self._windows.popleft()
        if self._clock is not None:
            marks = [moment for collective in collectives for moment in collective[:2]]
            last = entries[-1][0]
            entries, collectives = self._on_device_time(entries, events, collectives)
            self._began = entries[-1][0]
            self._clock.take_back([*events[:-1], *marks])
            if len(self._entries) > 1 or self._collectives or self._windows:
                # both clocks drift apart: it took place between its record on the host and now
                self._clock.go_on_from(events[-1], min(max(self._began, last), monotonic()))
            else:
                self._clock.take_back(events[-1:])
                self._clock.restart()
                self._entry_events = [self._clock.mark()]
        timed = [
            Collective(began, max(0.0, ended - began), *what)  # streams of a device have an order each
            for began, ended, *what in collectives
        ]
        return Recorded(entries, timed, is_cut)

    def _on_device_time(
        self, entries: list[Entry], events: list[Event], collectives: list[_Marked]
    ) -> tuple[list[Entry], list[_Marked]]:
        """Returns both with times of the device; with the host's, and no collectives, where it is behind."""
        assert self._clock is not None
        marked = [moment for collective in collectives for moment in collective[:2]]
        times = self._clock.seconds([*marked, *events])
        if times is None:
            return entries, []
        moments, times = times[: len(marked)], times[len(marked) :]
        if self._began is not None:
            times[0] = self._began
        times = list(accumulate(times, max))  # the first one is of another base
        timed = [(time, *entry[1:]) for time, entry in zip(times, entries, strict=True)]
        return timed, [
            (began, ended, *what)
            for began, ended, (_, _, *what) in zip(moments[::2], moments[1::2], collectives, strict=True)
        ]
