"""The verdict of `benchmarks/train_step.py --against`: the slower of wall and CPU time decides."""

from __future__ import annotations

from benchmarks.train_step import least_ratio, rows
from benchmarks.turns import SideTurn


def _turns(wall_s: float, cpu_s: float) -> list[SideTurn]:
    return [SideTurn(scale * wall_s, scale * cpu_s, 500.0, 9.0) for scale in (1.0, 1.5, 9.0)]


def test_the_least_ratio_is_that_of_wall_or_cpu_time() -> None:
    before = _turns(1.0, 1.0)
    assert least_ratio(before, _turns(0.5, 2.0)) == 0.5
    assert least_ratio(before, _turns(2.0, 0.5)) == 0.5
    assert least_ratio(before, before) == 1.0


def test_ratios_are_those_of_the_first_side() -> None:
    first, second = rows("fp32", {"before": _turns(2.0, 1.0), "here": _turns(1.0, 2.0)})
    assert first.startswith("| fp32 | before | 3000 | 1 | 1500 | 1 | 500 |")
    assert second.startswith("| fp32 | here | 1500 | 2.00 (2.00 to 2.00) | 3000 | 0.50 (0.50 to 0.50) |")
