"""The planner's promises against published measurements, and the page that shows them."""

from __future__ import annotations

import pytest

from benchmarks.planner.validation import PAGE, ReportSection, sections, tables, with_tables


@pytest.fixture(scope="module")
def found() -> list[ReportSection]:
    return sections()


def test_every_promise_holds(found: list[ReportSection]) -> None:
    promises = [promise for section in found for promise in section.promises]
    assert len(promises) >= 10
    broken = [f"{promise.name}: {promise.reached}, bound {promise.bound}" for promise in promises if not promise.holds]
    assert not broken


def test_the_page_shows_these_tables(found: list[ReportSection]) -> None:
    """`python -m benchmarks.planner.validation` writes them."""
    page = PAGE.read_text()
    assert with_tables(page, tables(found)) == page
