"""The numbers of a step's record under flat names, for services that draw one curve for each name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def flat_numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record but its step; nested ones as `parts/forward`. Lists and texts are left out."""
    numbers: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            group = name.removesuffix("_s")
            numbers |= {f"{group}/{key}": number for key, number in flat_numbers(value).items()}
        elif isinstance(value, int | float) and name != "step":
            numbers[name] = value
    return numbers
