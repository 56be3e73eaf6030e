"""Promise 1: any layout computes the same thing, and it is what transformers computes on one process.

The default run takes a sample of the layouts of up to six ranks in which every pair of settings occurs, and two with
four stages of two chunks; test_special_models.py has other four-way cuts. `--exhaustive` takes all layouts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from launch.parity.layout import ParityLayout
from launch.parity.verify import Session
from tests.helpers.odd_sizes import (
    DEEP_LAYOUTS,
    LAYOUTS,
    TIMEOUT_S,
    Family,
    explain,
    legal_cases,
    references_of,
    sample,
)

FOUR_STAGES = [
    ParityLayout(pp=4, dp=2, zero=2, recompute="full/none/selective/none", accumulation=4, schedule="interleaved"),
    ParityLayout(pp=4, recompute="full", accumulation=8, schedule="dualpipev"),
]


@cache
def _session(family: Family) -> Session:
    return Session(references_of(family.problem()), TIMEOUT_S)


def _check(layout: ParityLayout, family: Family) -> None:
    verdict = _session(family).run(layout)
    assert verdict.passed, explain(verdict)


def _name(value: object) -> str:
    return {True: "tied", False: "untied"}.get(value, str(value)) if isinstance(value, bool) else str(value)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "tied"), [*sample(), *((layout, True) for layout in FOUR_STAGES)], ids=_name)
def test_sample_of_pairs(layout: ParityLayout, tied: bool) -> None:
    """Sequences can be cut in all of them: a reference takes as long as three layouts."""
    _check(layout, replace(Family.of(layout, tied), sequence_parallel=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "tied"), legal_cases([*LAYOUTS, *DEEP_LAYOUTS]), ids=_name)
def test_every_layout(layout: ParityLayout, tied: bool) -> None:
    _check(layout, Family.of(layout, tied))
