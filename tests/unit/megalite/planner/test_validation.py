"""The planner's promises against published measurements, and the page that shows them.

What runs are simulated for takes nine tenths of the time, so that part has its turn with `--exhaustive`; the simulation
itself is held to closed forms in reliability/test_run_simulation.py.
"""

from __future__ import annotations

import pytest

from benchmarks.planner import validation
from benchmarks.planner.simulation import validation_rows

page = validation.PAGE.read_text()


def check(found: list[validation.ReportSection]) -> None:
    promises = [promise for section in found for promise in section.promises]
    broken = [f"{promise.name}: {promise.reached}, bound {promise.bound}" for promise in promises if not promise.holds]
    assert found and not broken
    for text in (
        *(section.text.strip() for section in found),
        *(f"| {each.name} | {each.reached} |" for each in promises),
    ):
        assert text in page, "`python -m benchmarks.planner.validation` writes the page"


@pytest.mark.parametrize("made", ["memory", "step_times", "step_times_h100", "layouts", "reliability"])
def test_every_promise_holds_and_stands_in_the_page(made: str) -> None:
    check([getattr(validation, made)()])


@pytest.mark.exhaustive
def test_simulations_stay_within_their_bounds() -> None:
    """Best interval within 10 %, goodput within 0.3 points, Meta's formula within 1.5 %, and what Llama 3, MegaScale
    and BLOOM published."""
    checks = validation_rows()
    assert not [check for check in checks if not check.passes]
    for words, count in (("best interval", 4), ("goodput", 10), ("ETTR", 6), ("Llama 3", 2), ("MegaScale", 4)):
        assert sum(check.name.startswith(words) for check in checks) == count


@pytest.mark.exhaustive
def test_the_page_is_what_would_be_written() -> None:
    found = validation.sections()
    check(found)
    assert validation.with_tables(page, validation.tables(found)) == page
