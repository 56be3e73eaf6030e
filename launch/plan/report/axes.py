"""Scales from values to coordinates, and the ticks beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from launch.plan.report.elements import label, line


@dataclass(frozen=True)
class Scale:
    """`low` is drawn at coordinate `start`, `high` at `end`, which may be the smaller one."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return self.start + (value - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """Round values between `low` and `high`, in equal steps."""
        rough = (self.high - self.low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def vertical_axis(scale: Scale, left: float, right: float, ticks: Mapping[float, str], title: str) -> list[Element]:
    """Grid lines, what is written at their left, and what they are above that."""
    drawn = [label(left - 44, min(scale.start, scale.end) - 14, title, class_="axis")]
    for tick, words in ticks.items():
        y = scale(tick)
        drawn += [line(left, y, right, y, "grid")]
        drawn += [label(left - 8, y + 4, words, class_="tick", text_anchor="end")]
    return drawn


def horizontal_axis(scale: Scale, top: float, bottom: float, ticks: Mapping[float, str], title: str) -> list[Element]:
    """Grid lines, what is written below them, and what they are below that."""
    middle = (scale.start + scale.end) / 2
    drawn = [label(middle, bottom + 38, title, class_="axis", text_anchor="middle")]
    for tick, words in ticks.items():
        x = scale(tick)
        drawn += [line(x, top, x, bottom, "grid")]
        drawn += [label(x, bottom + 18, words, class_="tick", text_anchor="middle")]
    return drawn
