"""Finds ranks that are slower than others that do the same work. No torch.

Ranks of one pipeline stage do the same work, so their own times are compared: forward and backward without waiting for
anybody. Time spent waiting would name the ranks that suffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

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
        self._others = [
            [other for other in range(len(stages)) if other != rank and stages[other] == stage]
            for rank, stage in enumerate(stages)
        ]
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
        changes = [change for rank in range(len(self._stages)) if (change := self._judge(rank)) is not None]
        self._steps = 0
        for sums in self._seconds.values():
            sums[:] = [0.0] * len(sums)
        return changes

    def _judge(self, rank: int) -> SlowRank | None:
        own = [sum(sums[each] for sums in self._seconds.values()) for each in range(len(self._stages))]
        others = [other for other in self._others[rank] if own[other] > 0]  # the rest failed to record their steps
        if not others or own[rank] <= 0:
            return None
        speed = median(own[other] for other in others) / own[rank]
        was_slow = self._slow_windows[rank] >= IN_A_ROW
        self._slow_windows[rank] = self._slow_windows[rank] + 1 if speed < SLOW else 0
        is_slow = self._slow_windows[rank] >= IN_A_ROW
        if is_slow == was_slow:
            return None
        behind = {
            part: sums[rank] / max(median(sums[other] for other in others), 1e-9)
            for part, sums in self._seconds.items()
        }
        part = max(behind, key=lambda name: behind[name])
        return SlowRank(rank, self._stages[rank], self._hosts[rank], part, round(speed, 4), is_over=not is_slow)
