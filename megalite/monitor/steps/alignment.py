"""The timelines of steps on one clock.

Ranks of one boot of a machine share `time.monotonic`. Clocks of others are compared by the moments in which ranks left
the same meetings, which are the same up to some milliseconds: the median of them is. No torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from megalite.monitor.steps.timeline import RankTimeline


@dataclass(frozen=True)
class AlignedStep:
    """The timelines of a step, all on the clock of the lowest rank, and how that was found."""

    timelines: Mapping[int, RankTimeline]  # by rank
    met: Mapping[str, int]  # boot -> meetings by which its clock was compared, if it is another one
    unmet: frozenset[str]  # hosts without a common meeting, whose clocks are compared by the time of day

    @property
    def first(self) -> RankTimeline:
        """The timeline of the lowest rank."""
        return self.timelines[min(self.timelines)]

    @property
    def day_s(self) -> float:
        """Seconds to add to a time for the time of day in unix seconds."""
        return _behind_time_of_day(self.first)


def align(timelines: Collection[RankTimeline]) -> AlignedStep:
    """Returns the timelines with times on the clock of the lowest rank. Raises ValueError where there are none."""
    if not timelines:
        raise ValueError("there is no timeline of this step")
    ordered = sorted(timelines, key=lambda timeline: timeline.owner.rank)
    by_boot: dict[str, list[RankTimeline]] = defaultdict(list)
    for timeline in ordered:
        by_boot[timeline.owner.boot].append(timeline)
    (own, first), *others = by_boot.items()
    ahead_s: dict[str, float] = {own: 0.0}
    met: dict[str, int] = {}
    unmet: set[str] = set()
    reference = _meetings(first)
    for boot, of_boot in others:
        theirs = _meetings(of_boot)
        apart = [theirs[step] - reference[step] for step in reference.keys() & theirs.keys()]
        if apart:
            ahead_s[boot], met[boot] = median(apart), len(apart)
        else:
            ahead_s[boot] = median(map(_behind_time_of_day, first)) - median(map(_behind_time_of_day, of_boot))
            unmet.update(timeline.owner.host for timeline in of_boot)
    return AlignedStep(
        {each.owner.rank: _shifted(each, -ahead_s[each.owner.boot]) for each in ordered}, met, frozenset(unmet)
    )


def on_last_clock(steps: Sequence[AlignedStep]) -> list[dict[int, RankTimeline]]:
    """Returns the timelines of each step by rank, all on the clock of the last one.

    Steps of another boot of its machine, as those before a restart elsewhere, are put where they were by time of day.
    """
    last = steps[-1]
    moved = []
    for step in steps:
        is_same_clock = step.first.owner.boot == last.first.owner.boot
        seconds = 0.0 if is_same_clock else step.day_s - last.day_s
        moved.append({rank: _shifted(timeline, seconds) for rank, timeline in step.timelines.items()})
    return moved


def _shifted(timeline: RankTimeline, seconds: float) -> RankTimeline:
    """Returns the timeline with all of its times so much later."""
    if not seconds:
        return timeline
    return replace(
        timeline,
        ended=timeline.ended + seconds,
        notes=[note._replace(time=note.time + seconds) for note in timeline.notes],
        collectives=[each._replace(began=each.began + seconds) for each in timeline.collectives],
        meetings={step: time + seconds for step, time in timeline.meetings.items()},
    )


def _meetings(timelines: Collection[RankTimeline]) -> dict[int, float]:
    """Returns when ranks of one clock left each meeting, in the median."""
    times: dict[int, list[float]] = defaultdict(list)
    for timeline in timelines:
        for step, time in timeline.meetings.items():
            times[step].append(time)
    return {step: median(each) for step, each in times.items()}


def _behind_time_of_day(timeline: RankTimeline) -> float:
    return timeline.unix - timeline.ended
