"""Numbers as people read them: three digits, and the unit that fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megalite.units import about, count, digits, duration, epochs, gib, percent, plural, rounded, seconds


@pytest.mark.parametrize(
    ("words", "value", "text"),
    [
        (gib, 0, "0 GiB"),
        (gib, 3.3 * 2**20, "3.3 MiB"),
        (gib, 456 * 2**20, "456 MiB"),
        (gib, 999.6 * 2**20, "0.976 GiB"),
        (gib, 1010 * 2**20, "0.986 GiB"),
        (gib, 9.87 * 2**30, "9.87 GiB"),
        (gib, 79.64 * 2**30, "79.6 GiB"),
        (gib, 141.2 * 2**30, "141.2 GiB"),
        (gib, 1234.5 * 2**30, "1,234.5 GiB"),
        (digits, 0.04561, "0.0456"),
        (digits, 75, "75.0"),
        (digits, 999.4, "999"),
        (digits, 1234.5, "1,234"),
        (seconds, 0, "0.00 s"),
        (seconds, 0.0000456, "45.6 µs"),
        (seconds, 0.0456, "45.6 ms"),
        (seconds, -0.00522, "-5.22 ms"),
        (seconds, 12.34, "12.3 s"),
        (seconds, 4321, "4,321 s"),
        (seconds, 999.7, "1,000 s"),
        (duration, 90, "1.5 min"),
        (duration, 30, "30.0 s"),
        (duration, 720, "12 min"),
        (duration, 5.1 * 3600, "5.1 h"),
        (duration, 3.2 * 86400, "3.2 days"),
        (duration, 2000 * 86400, "2,000 days"),
        (duration, float("inf"), "forever"),
        (about, 0.553, "600 ms"),
        (about, 2.11, "2 s"),
        (about, 95, "2 min"),
        (about, 26 * 3600, "30 h"),
        (about, 19 * 86_400, "20 days"),
        (about, 0.00004, "0.04 ms"),
        (rounded, 0.044, "0.044 s"),
        (rounded, 599.4, "599 s"),
        (rounded, 600, "10 min"),
        (rounded, 11520, "3.2 h"),
        (percent, 0, "0 %"),
        (percent, 0.0001, "< 0.1 %"),
        (percent, 0.5668, "56.7 %"),
        (count, 123456, "123,456"),
        (count, 1.234e6, "1.23 M"),
        (count, 4.05e11, "405 G"),
        (count, 999.6e6, "1,000 M"),
        (epochs, 0, "0.00"),
        (epochs, 0.0042, "0.0042"),
        (epochs, 0.0999, "0.100"),
        (epochs, 1.5, "1.50"),
    ],
)
def test_numbers_are_for_people(words: Callable[[float], str], value: float, text: str) -> None:
    assert words(value) == text


def test_one_is_not_many() -> None:
    assert (plural(1, "stage"), plural(4096, "stage")) == ("1 stage", "4,096 stages")
