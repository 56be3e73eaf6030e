"""Gradients of replicas on two hosts with a slow link between them: ZeRO-1 sends them while backward goes on.

Backward sleeps a second, and the link is so slow that the gradients take one too: what else the machine does is small
against both.
"""

from __future__ import annotations

import statistics

import pytest

from benchmarks.throttled_link.__main__ import measure
from benchmarks.throttled_link.cases import CASES

pytestmark = pytest.mark.slow


def test_a_step_is_faster_by_what_is_sent_beside_backward(can_make_hosts: None) -> None:
    """The steps of both sides take turns in the same ranks; in those of the first the reducer is kept back until
    backward has ended."""
    _, (after, beside) = measure(CASES[0], pairs=3)
    # new weights, a third of the bytes, come beside forward, and then about 4/5 of the gradients, which are the others
    assert max(step.sent for step in after) < 0.4 and min(step.sent for step in beside) > 0.6
    can_be_hidden = statistics.median(step.hideable_s for step in after)
    assert can_be_hidden > 0.5
    saved = statistics.median(a.step_s - b.step_s for a, b in zip(after, beside, strict=True))
    assert saved > 0.7 * can_be_hidden
