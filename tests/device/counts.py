"""What a device that is not there has been asked for, and how it behaves."""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass


@dataclass(frozen=True)
class Counts:
    """Numbers of calls, in the order of the stand-in's own list (stand_in/device.h)."""

    launches: int  # of kernels, products of matrices included
    products: int
    copies: int
    fills: int
    syncs: int  # the host has waited until a stream or the device was idle
    event_syncs: int  # it has waited for an event
    queries: int
    streams: int  # made
    events: int  # made
    records: int  # of events
    waits: int  # of one stream for another
    allocations: int  # from the driver
    collectives: int
    sends: int
    receptions: int
    communicators: int
    splits: int  # of one, in which all its ranks take part

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))


def counts_now() -> Counts:
    """The counts of this process since it began."""
    numbers = (ctypes.c_uint64 * len(Counts.__annotations__))()
    ctypes.CDLL(None).stand_in_counts(numbers)
    return Counts(*numbers)


def change_setting(name: str, value: float) -> None:
    """Changes a variable of the stand-in in a process that may have read it."""
    ctypes.CDLL(None).stand_in_set(name.encode(), ctypes.c_double(value))
