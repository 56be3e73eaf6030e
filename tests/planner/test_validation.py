"""The planner's promises against published measurements, and the page that shows them."""

from __future__ import annotations

import pytest

from benchmarks.planner_validation import PAGE, Section, sections, tables, with_tables


@pytest.fixture(scope="module")
def found() -> list[Section]:
    return sections()


def test_every_promise_holds(found: list[Section]) -> None:
    promises = [promise for section in found for promise in section.promises]
    assert len(promises) >= 10
    broken = [f"{promise.name}: {promise.reached}, bound {promise.bound}" for promise in promises if not promise.holds]
    assert not broken


def test_the_page_shows_these_tables(found: list[Section]) -> None:
    """`python -m benchmarks.planner_validation` writes them."""
    page = PAGE.read_text()
    assert with_tables(page, tables(found)) == page
