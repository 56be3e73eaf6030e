"""The time a run still needs, and how a clock shows it."""

from __future__ import annotations

import pytest

from megalite.monitor.progress import clock, seconds_left


def test_one_slow_step_does_not_move_the_time_left() -> None:
    """The mean of these would be 10.9 s a step."""
    assert seconds_left(100, [1.0] * 9 + [100.0]) == 100
    assert seconds_left(0, [1.0]) == 0 and seconds_left(5, []) is None


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0:00"), (7.9, "0:07"), (754, "12:34"), (18367, "5:06:07"), (273_900, "3 d 04:05"), (-3, "0:00")],
)
def test_a_duration_is_short_and_never_negative(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown
