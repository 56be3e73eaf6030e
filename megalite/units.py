"""Numbers with units: sums of figures that belong together, and their formatting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import add
from typing import Self

MIB, GIB = 2**20, 2**30
_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


@dataclass(frozen=True)
class Additive:
    """A dataclass that is added and multiplied field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(add, vars(self).values(), vars(other).values()))

    @classmethod
    def sum(cls, many: Sequence[Self]) -> Self:
        """Returns what adding one after the other gives, in a fraction of the time."""
        columns = zip(*(vars(one).values() for one in many), strict=True)
        return cls(*(one.sum(rest) if isinstance(one := rest[0], Additive) else sum(rest[1:], one) for rest in columns))

    def __rmul__(self, factor: float) -> Self:
        return type(self)(*(factor * value for value in vars(self).values()))


def gib(size_bytes: float) -> str:
    """Formats bytes: `1,234.5 GiB`, `9.87 GiB`, or `456 MiB`: three digits, and tenths of what is compared with
    limits."""
    if 0 < abs(size_bytes) < 999.5 * MIB:
        return f"{size_bytes / MIB:.3g} MiB"
    return f"{size_bytes / GIB:,.1f} GiB" if abs(size_bytes) >= 10 * GIB else f"{size_bytes / GIB:.3g} GiB"


def digits(value: float) -> str:
    """Formats a number with three digits, or all before the decimal point: `0.0456`, `75.0`, `1,234`."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def seconds(value_s: float) -> str:
    """Formats seconds with three digits in a fitting unit: `12.3 s`, `45.6 ms`, `-1.2 ms`."""
    if value_s < 0:
        return f"-{seconds(-value_s)}"
    factor, unit = (1.0, "s") if value_s >= 1 or not value_s else (1e3, "ms") if value_s >= 1e-3 else (1e6, "µs")
    return f"{digits(value_s * factor)} {unit}"


def duration(value_s: float) -> str:
    """Formats a long duration: `3.2 days`, `5.1 h`, `12 min`."""
    if value_s == math.inf:
        return "forever"
    for size, unit in ((2 * 86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if value_s >= size:
            return f"{short(value_s / (86400.0 if unit == 'days' else size))} {unit}"
    return seconds(value_s)


def rounded(value_s: float) -> str:
    """Formats a duration for a sentence: `0.04 s`, `312 s`, `12 min`, `3.2 h`."""
    if value_s < 600:
        return f"{value_s:{'.2g' if value_s < 10 else '.0f'}} s"
    return f"{value_s / 60:.0f} min" if value_s < 7200 else f"{value_s / 3600:.1f} h"


def about(value_s: float) -> str:
    """Formats a guessed duration with one digit: `3 days`, `20 min`, `600 ms`."""
    if value_s == math.inf:
        return "forever"
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms")):
        if value_s >= (2 * size if unit == "days" else size):
            break
    return f"{float(f'{value_s / size:.1g}'):,g} {unit}"


def percent(part: float) -> str:
    """Formats a fraction of one: `56.7 %`."""
    return f"{part * 100:.1f} %" if part > 0.00095 else ("0 %" if part == 0 else "< 0.1 %")


def count(value: float) -> str:
    """Formats a count: `123,456`, or `1.23 M` where digits would be noise."""
    if value < 999_999.5:
        return f"{value:,.0f}"
    power = 0
    while value >= 1000 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{short(value)} {_PREFIXES[power]}"


def short(value: float) -> str:
    """Formats at most three digits, but whole numbers whole: `12`, `5.1`, `1,234`."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def of_stages(texts: Sequence[str]) -> str:
    """Returns the text of each pipeline stage, as `stages 0-2 full, stage 3 none`; alone where all have the same."""
    parts, first = [], 0
    for text, alike in groupby(texts):
        last = first + len(list(alike)) - 1
        parts.append(f"stages {first}-{last} {text}" if last > first else f"stage {first} {text}")
        first = last + 1
    return ", ".join(parts) if len(parts) > 1 else texts[0]


def plural(number: int, noun: str) -> str:
    """Formats a count with its noun: `1 stage`, `4 stages`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def epochs(number: float) -> str:
    """Returns a number of epochs with two digits after the point, or two that are not zero: "1.50", "0.0042"."""
    digits = 2 if not 0 < number < 0.1 else 1 - math.floor(math.log10(number))
    return f"{number:,.{digits}f}"
