"""The table of `benchmarks.startup`."""

from __future__ import annotations

import pytest

from benchmarks.startup import EVERYTHING, Seconds, rows


@pytest.mark.parametrize(
    ("ratios", "told"),
    [
        ((1.0, 1.0, 1.0, 3.0), "1.00 (1.00 to 1.50)"),  # half-way between the third and the fourth would be 2.50
        ((1.0, 2.0, 3.0), ""),
    ],
)
def test_quartiles_are_told_of_four_pairs_and_lie_between_their_neighbours(
    ratios: tuple[float, ...], told: str
) -> None:
    other, mine = ([{EVERYTHING: Seconds(cpu, 1.0)} for cpu in side] for side in ((1.0,) * len(ratios), ratios))
    (line,) = rows(other, mine, is_quiet=False)
    assert line.split(" | ")[3] == told
