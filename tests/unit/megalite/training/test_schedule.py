"""The learning rate is a pure function of the step."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config.sections import ScheduleConfig
from megalite.training.state import learning_rate_factor

NAMES = st.sampled_from(["cosine", "linear", "wsd", "constant"])


def curve(total: int, **options: object) -> list[float]:
    schedule = ScheduleConfig.model_validate(options)
    return [learning_rate_factor(schedule, step, total) for step in range(total)]


@given(name=NAMES, total=st.integers(2, 300), warmup_share=st.floats(0, 0.999), low=st.floats(0, 1))
def test_rises_to_the_peak_falls_to_the_end_and_stays_between(
    name: str, total: int, warmup_share: float, low: float
) -> None:
    """A peak that is never reached, or a last step that is not the end, would be an off-by-one."""
    warmup = int(total * warmup_share)
    factors = curve(total, name=name, warmup_steps=warmup, min_learning_rate_ratio=low)
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising) and all(0 < factor <= 1 for factor in rising)
    assert falling == sorted(falling, reverse=True)
    assert max(factors) == pytest.approx(1.0)
    if name != "constant":
        assert falling[-1] == pytest.approx(low)


def test_closed_forms() -> None:
    assert curve(5, name="linear", min_learning_rate_ratio=0.0) == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert curve(4, name="cosine", warmup_steps=1, min_learning_rate_ratio=0.2) == pytest.approx(
        [1, 1, 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 2)), 0.2]
    )
    assert curve(6, name="wsd", decay_steps=3, min_learning_rate_ratio=0.1) == pytest.approx([1, 1, 1, 0.7, 0.4, 0.1])
    assert curve(4, name="constant", warmup_steps=2) == [0.5, 1, 1, 1]


def test_a_warm_up_up_to_the_last_step_leaves_that_one_to_the_end() -> None:
    for name in ("cosine", "linear"):
        assert curve(4, name=name, warmup_steps=3, min_learning_rate_ratio=0.2) == pytest.approx([1 / 3, 2 / 3, 1, 0.2])
        assert curve(1, name=name) == [1.0]


def test_a_run_shorter_than_its_warm_up_ends_on_the_way() -> None:
    assert curve(3, name="cosine", warmup_steps=10) == pytest.approx([0.1, 0.2, 0.3])


def test_a_longer_run_keeps_what_was_before_the_decay() -> None:
    """wsd is chosen so that a run can be extended: its steps before the decay must not depend on the length."""
    assert curve(50, name="wsd", decay_steps=10)[:40] == curve(90, name="wsd", decay_steps=10)[:40]
