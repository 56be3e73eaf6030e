"""The planner's promises against published measurements, and the page that shows them."""

from __future__ import annotations

import pytest

from benchmarks.planner.simulation import validation_rows
from benchmarks.planner.validation import PAGE, ReportSection, sections, tables, with_tables


@pytest.fixture(scope="module")
def found() -> list[ReportSection]:
    return sections()


def test_every_promise_holds(found: list[ReportSection]) -> None:
    promises = [promise for section in found for promise in section.promises]
    assert len(promises) >= 10
    broken = [f"{promise.name}: {promise.reached}, bound {promise.bound}" for promise in promises if not promise.holds]
    assert not broken


def test_simulations_stay_within_their_bounds(found: list[ReportSection]) -> None:
    """Best interval within 10 %, goodput within 0.3 points, Meta's formula within 1.5 %, and what Llama 3, MegaScale
    and BLOOM published."""
    checks = validation_rows()
    assert not [check for check in checks if not check.passes]
    for words, count in (("best interval", 4), ("goodput", 10), ("ETTR", 6), ("Llama 3", 2), ("MegaScale", 4)):
        assert sum(check.name.startswith(words) for check in checks) == count


def test_the_page_shows_these_tables(found: list[ReportSection]) -> None:
    """`python -m benchmarks.planner.validation` writes them."""
    page = PAGE.read_text()
    assert with_tables(page, tables(found)) == page
