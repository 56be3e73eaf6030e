"""Parallel efficiency, and where the loss goes: arithmetic alone.

The efficiency of a point is its speed per rank over that of the smallest point. With t(p) the rank-seconds that one
token costs at point p, it is E = t(base) / t(p), and the loss 1 - E = (t(p) - t(base)) / t(p). The parts of a step add
up to it, so that the loss is the sum over parts of (part(p) - part(base)) / t(p), whatever the batches are.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launch.experiments.comparison import mean_parts
from launch.experiments.measurement import RunMeasurement
from megalite.monitor.steps.parts import PARTS
from megalite.units import plural

PART_NAMES = {**PARTS, "loss": "computing the loss"}  # where `loss` alone would be taken for that of efficiency
WORTH_TELLING = 0.005  # of the whole: half a point of efficiency


@dataclass(frozen=True)
class ScalingPoint:
    """The runs on one number of ranks."""

    name: str
    ranks: int
    runs: tuple[RunMeasurement, ...]  # its rounds; empty if none worked
    failure: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of a step: the median over rounds."""
        return statistics.median(run.step_s for run in self.runs)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together."""
        return self.runs[0].tokens_per_step / self.step_s

    @property
    def predicted_tokens_per_s(self) -> float | None:
        """The same by the prediction that the runs made before their first step; None if they made none."""
        known = [run.predicted_step_s for run in self.runs if run.predicted_step_s]
        return self.runs[0].tokens_per_step / statistics.median(known) if known else None

    @property
    def cost_by_part(self) -> dict[str, float]:
        """Rank-seconds per token by part of the step, which add up to `ranks / tokens_per_s`; empty if unknown."""
        parts = mean_parts([run.parts_s for run in self.runs])
        whole = sum(parts.values())
        return {name: value / whole * self.ranks / self.tokens_per_s for name, value in parts.items()} if whole else {}


def efficiency(ranks: int, rate: float, base_ranks: int, base_rate: float) -> float:
    """Returns the rate per rank over that of the base; 1 is ideal."""
    return (rate / ranks) / (base_rate / base_ranks)


@dataclass(frozen=True)
class ScaledPoint:
    """A point beside the smallest one, which all are compared with."""

    point: ScalingPoint
    ideal_tokens_per_s: float
    efficiency: float
    predicted_efficiency: float | None
    loss_by_part: Mapping[str, float]  # of the whole, adding up to 1 - efficiency; negative: gained

    @classmethod
    def of(cls, point: ScalingPoint, base: ScalingPoint) -> ScaledPoint:
        """Compares a point that has worked with the smallest one that has."""
        predicted, base_predicted = point.predicted_tokens_per_s, base.predicted_tokens_per_s
        is_predicted = predicted is not None and base_predicted is not None
        cost, base_cost = point.cost_by_part, base.cost_by_part
        whole = sum(cost.values())
        return cls(
            point,
            base.tokens_per_s / base.ranks * point.ranks,
            efficiency(point.ranks, point.tokens_per_s, base.ranks, base.tokens_per_s),
            efficiency(point.ranks, predicted, base.ranks, base_predicted) if is_predicted else None,  # type: ignore[arg-type]
            {name: (cost[name] - base_cost[name]) / whole for name in PARTS} if cost and base_cost else {},
        )

    def sentence(self) -> str:
        """Says how efficient the point is, and what the loss is made of."""
        start = f"{plural(self.point.ranks, 'rank')} ({self.point.name}): efficiency {100 * self.efficiency:.0f} %"
        if self.point.name == plural(self.point.ranks, "rank"):
            start = f"{self.point.name}: efficiency {100 * self.efficiency:.0f} %"
        if 1 - self.efficiency < WORTH_TELLING:
            return f"{start}: nothing is lost"
        if not self.loss_by_part:
            return f"{start}: what is lost was not recorded by part"
        largest = sorted(self.loss_by_part.items(), key=lambda part: -part[1])
        lost = [(PART_NAMES[name], 100 * value) for name, value in largest if value > 0]
        won = [(PART_NAMES[name], -100 * value) for name, value in reversed(largest) if value < 0]
        named = ", ".join(f"{points:.0f} to {part}" for part, points in lost if points >= 100 * WORTH_TELLING)
        sentence = f"{start}: of {sum(points for _, points in lost):.0f} points lost, {named}"
        if sum(points for _, points in won) >= 100 * WORTH_TELLING:
            sentence += f"; {sum(points for _, points in won):.0f} won back, most of it in {won[0][0]}"
        return sentence

    def facts(self) -> dict[str, Any]:
        """Returns the point for JSON."""
        point = self.point
        return {
            "name": point.name,
            "ranks": point.ranks,
            "layout": dict(point.runs[0].layout),
            "global_batch_size": point.runs[0].samples_per_step,
            "runs": [str(run.run_dir) for run in point.runs],
            "step_s": point.step_s,
            "tokens_per_s": point.tokens_per_s,
            "tokens_per_s_of_rounds": [run.tokens_per_s for run in point.runs],
            "ideal_tokens_per_s": self.ideal_tokens_per_s,
            "predicted_tokens_per_s": point.predicted_tokens_per_s,
            "efficiency": self.efficiency,
            "predicted_efficiency": self.predicted_efficiency,
            "loss_by_part": dict(self.loss_by_part) or None,
            "failure": point.failure or None,
        }


def scaled(points: Sequence[ScalingPoint]) -> list[ScaledPoint]:
    """Compares the points that have worked with the smallest of them."""
    working = sorted((point for point in points if point.runs), key=lambda point: point.ranks)
    return [ScaledPoint.of(point, working[0]) for point in working]
