"""Compares the points of a series: the rounds of each, and how much faster it is than the first one. No torch.

A ratio is taken within each round, whose runs were made one after the other, so that a machine that is slow for a while
is so for both. Its spread over the rounds says what it is worth.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.experiments.measurement import RunMeasurement
from launch.experiments.series import SeriesPoint
from launch.experiments.series_runs import SeriesResults
from megalite.monitor.steps.parts import PARTS

LEAST_ROUNDS = 3
"""Equal points are called different in 29 of 100 cases after 2 rounds, in 9 after 3 and in 1 after 5 (normal noise)."""


@dataclass(frozen=True)
class RoundSpread:
    """A number that was measured in several rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def width(self) -> float:
        """The distance of the largest from the smallest value."""
        return max(self.values) - min(self.values)

    @property
    def is_known(self) -> bool:
        """False after fewer than `LEAST_ROUNDS`, which say too little about the spread."""
        return len(self.values) >= LEAST_ROUNDS

    def facts(self) -> dict[str, Any]:
        """Returns the numbers for JSON."""
        return {"median": self.median, "low": min(self.values), "high": max(self.values), "rounds": list(self.values)}


@dataclass(frozen=True)
class PointResult:
    """The runs of one point."""

    point: SeriesPoint
    runs: Mapping[int, RunMeasurement]  # by round; empty if none worked
    failure: str  # why a run failed; empty if none did
    speed: (
        RoundSpread | None
    )  # in tokens per second, over the first point's of the same round; None without a common one

    def spread(self, name: str) -> RoundSpread:
        """Returns a number of the runs, such as `step_s`. The point must have worked."""
        return RoundSpread(tuple(getattr(run, name) for run in self.runs.values()))

    def median(self, name: str) -> float | None:
        """Returns the median over the rounds that know such a number; None if none does."""
        found = [value for run in self.runs.values() if (value := getattr(run, name)) is not None]
        return statistics.median(found) if found else None

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts of a step, mean over the rounds; empty if they were not recorded."""
        return mean_parts([run.parts_s for run in self.runs.values()])

    @property
    def is_distinguishable(self) -> bool:
        """True if this point and the first one differ by more than the spread of their ratio over the rounds."""
        return self.speed is not None and self.speed.is_known and abs(self.speed.median - 1) > self.speed.width

    def facts(self) -> dict[str, Any]:
        """Returns the point for JSON; numbers that are not known are null."""
        facts: dict[str, Any] = {
            "name": self.point.name,
            "overrides": list(self.point.overrides),
            "failure": self.failure or None,
            "runs": [str(run.run_dir) for run in self.runs.values()],
        }
        if not self.runs:
            return facts
        return facts | {
            "step_s": self.spread("step_s").facts(),
            "tokens_per_s": self.spread("tokens_per_s").facts(),
            "samples_per_s": self.median("samples_per_s"),
            "parts_s": self.parts_s or None,
            "communication_share": self.median("communication_share"),
            "memory_peak_mib": self.median("memory_mib"),
            "predicted_step_s": self.median("predicted_step_s"),
            "speed_ratio": self.speed.facts() if self.speed is not None else None,
            "is_distinguishable": self.is_distinguishable,
        }


def compare(points: Sequence[SeriesPoint], results: SeriesResults) -> list[PointResult]:
    """Returns the result of each point, compared with the first one."""
    first = results.measured[0]
    found = []
    for place, point in enumerate(points):
        runs = results.measured[place]
        common = [number for number in sorted(runs) if number in first]
        ratios = tuple(runs[number].tokens_per_s / first[number].tokens_per_s for number in common)
        speed = RoundSpread(ratios) if ratios else None
        found.append(PointResult(point, runs, results.failures.get(place, ""), speed))
    return found


def mean_parts(of_runs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean seconds of each part over the runs that recorded them."""
    recorded = [parts for parts in of_runs if parts]
    return {name: statistics.fmean(parts.get(name, 0.0) for parts in recorded) for name in PARTS} if recorded else {}
