"""Finds ranks that are slower than others that do the same work. No torch.

Ranks of one pipeline stage do the same work, so their own times are compared: forward and backward without waiting for
anybody. Time spent waiting would name the ranks that suffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from megalite.monitor.steps.parts import OWN_WORK

WINDOW = 50  # steps over which own times are summed
SLOW = 0.85  # relative speed below which a rank is slow
IN_A_ROW = 3  # windows, after which it is told


@dataclass(frozen=True)
class SlowRank:
    """A rank that has become slow, or is so no longer."""

    rank: int
    stage: int
    host: str
    part: str  # of OWN_WORK, in which it is behind most
    relative_speed: float  # 1: as fast as the median of the other ranks of its stage
    is_over: bool = False

    def sentence(self) -> str:
        """Returns what the console says."""
        where = f"rank {self.rank} (stage {self.stage}, host {self.host})"
        if self.is_over:
            return f"{where} is as fast again as the other ranks of its stage"
        return (
            f"{where} works at {self.relative_speed:.0%} of the speed of the other ranks of its stage, {self.part} is "
            "behind most: all others wait for it; look at that host's clocks, temperature and other processes"
        )


class SlowRanks:
    """Compares ranks in windows of steps."""

    def __init__(self, stages: Sequence[int], hosts: Sequence[str]) -> None:
        """Both by rank."""
        self._stages, self._hosts = stages, hosts
        self._steps = 0
        self._seconds = {part: [0.0] * len(stages) for part in OWN_WORK}
        self._slow_windows = [0] * len(stages)

    def add(self, steps: int, seconds: Mapping[str, Sequence[float]]) -> list[SlowRank]:
        """Takes the own time of each rank in so many steps, by part; returns what has changed."""
        self._steps += steps
        for part, sums in self._seconds.items():
            for rank, value in enumerate(seconds[part]):
                sums[rank] += value
        if self._steps < WINDOW:
            return []
        own = [sum(of_parts) for of_parts in zip(*self._seconds.values(), strict=True)]
        speeds = relative_speeds(own, self._stages)
        changes = [change for rank, speed in speeds.items() if (change := self._judge(rank, speed, own)) is not None]
        self._steps = 0
        for sums in self._seconds.values():
            sums[:] = [0.0] * len(sums)
        return changes

    def _judge(self, rank: int, speed: float, own: Sequence[float]) -> SlowRank | None:
        was_slow = self._slow_windows[rank] >= IN_A_ROW
        self._slow_windows[rank] = self._slow_windows[rank] + 1 if speed < SLOW else 0
        is_slow = self._slow_windows[rank] >= IN_A_ROW
        if is_slow == was_slow:
            return None
        stage = self._stages[rank]
        others = [each for each, there in enumerate(self._stages) if there == stage and each != rank and own[each] > 0]
        behind = {
            part: sums[rank] / max(median(sums[other] for other in others), 1e-9)
            for part, sums in self._seconds.items()
        }
        part = max(behind, key=lambda name: behind[name])
        return SlowRank(rank, stage, self._hosts[rank], part, round(speed, 4), is_over=not is_slow)


def relative_speeds(own_s: Sequence[float], stages: Sequence[int]) -> dict[int, float]:
    """Returns the speed of ranks by their own times; 1 is that of the median of the other ranks of a stage.

    A rank without others, and one without a time, which failed to record its steps, has none. Thousands of ranks take
    milliseconds: each stage is sorted once.
    """
    own, where = np.asarray(own_s), np.asarray(stages)
    speeds: dict[int, float] = {}
    for stage in np.unique(where):
        ranks = np.flatnonzero((where == stage) & (own > 0))
        ranks = ranks[np.argsort(own[ranks], kind="stable")]
        times, others = own[ranks].tolist(), len(ranks) - 1
        for place, rank in enumerate(ranks.tolist() if others > 0 else []):
            low, high = ((others - 1) // 2, others // 2)  # of the others, which lack `place`
            usual = (times[low + (low >= place)] + times[high + (high >= place)]) / 2
            speeds[rank] = usual / times[place]
    return dict(sorted(speeds.items()))
