"""Micro-batches that a pipeline stage holds at once, by the table of its passes. No torch."""

from __future__ import annotations

from functools import lru_cache
from operator import ge
from typing import NamedTuple

from megalite.config.rules.pipeline import SPLITS_BACKWARD
from megalite.schedules.passes import PassKind
from megalite.schedules.tables import Schedule, tasks_of

MOST_LOOKED_AT = 3  # micro-batches per stage: a step with more holds no more at once


class InFlight(NamedTuple):
    """Micro-batches of each chunk of a stage at one moment."""

    whole: tuple[int, ...]  # between forward and the end of backward, or of the input gradient
    postponed: tuple[int, ...]  # between input gradient and weight gradient

    @property
    def total(self) -> int:
        return sum(self.whole) + sum(self.postponed)


def most_in_flight(
    schedule: Schedule, stages: int, stage: int, micro_batches: int, chunks: int
) -> tuple[InFlight, ...]:
    """Returns the moments of a step at which a stage holds most: those that no other moment exceeds in all numbers.

    Which of them needs most memory depends on the sizes of chunks. Under 1F1B it is one moment, with as many
    micro-batches as there are stages from this one on.
    """
    if schedule is Schedule.ONE_F_ONE_B:
        return (InFlight((min(micro_batches, stages - stage),), (0,)),)
    return moments_of(schedule, stages, stage, min(micro_batches, MOST_LOOKED_AT * stages), chunks)


@lru_cache(maxsize=4096)
def moments_of(schedule: Schedule, stages: int, stage: int, micro_batches: int, chunks: int) -> tuple[InFlight, ...]:
    """Returns the same with all micro-batches looked at."""
    whole, postponed = [0] * chunks, [0] * chunks
    moments = set()
    for kind, _, chunk in tasks_of(schedule, stages, stage, micro_batches, chunks):
        if kind is PassKind.FORWARD:
            whole[chunk] += 1
            moments.add(InFlight(tuple(whole), tuple(postponed)))
        elif kind is not PassKind.WEIGHT_GRADIENT:
            whole[chunk] -= 1
            if schedule in SPLITS_BACKWARD:  # a whole backward too: the engine sends its first part on at once
                postponed[chunk] += 1
                moments.add(InFlight(tuple(whole), tuple(postponed)))
        if kind is PassKind.WEIGHT_GRADIENT or (kind is PassKind.BACKWARD and schedule in SPLITS_BACKWARD):
            postponed[chunk] -= 1
    largest: list[InFlight] = []
    for moment in sorted(moments, key=lambda moment: -moment.total):  # none is exceeded by one after it
        numbers = moment.whole + moment.postponed
        if not any(all(map(ge, other.whole + other.postponed, numbers)) for other in largest):
            largest.append(moment)
    return tuple(largest)
