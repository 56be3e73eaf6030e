"""Promise 1: any layout computes the same thing, and it is what transformers computes on one process.

The default run takes a sample of the layouts of up to six ranks in which every pair of settings occurs;
test_special_models.py has four-way cuts and eight ranks. `--exhaustive` takes all layouts.
"""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from launch.parity.layout import ParityLayout
from launch.parity.verify import Session
from tests.helpers.odd_sizes import LAYOUTS, TIMEOUT_S, Family, explain, references_of, sample


@cache
def _session(family: Family) -> Session:
    return Session(references_of(family.problem()), TIMEOUT_S)


def _check(layout: ParityLayout, tied: bool) -> None:
    verdict = _session(Family.of(layout, tied)).run(layout)
    assert verdict.passed, explain(verdict)


def _name(value: object) -> str:
    return {True: "tied", False: "untied"}.get(value, str(value)) if isinstance(value, bool) else str(value)


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "tied"), sample(), ids=_name)
def test_sample_of_pairs(layout: ParityLayout, tied: bool) -> None:
    _check(layout, tied)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "tied"), itertools.product(LAYOUTS, (False, True)), ids=_name)
def test_every_layout(layout: ParityLayout, tied: bool) -> None:
    _check(layout, tied)
