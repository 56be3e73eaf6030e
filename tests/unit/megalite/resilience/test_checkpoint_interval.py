"""The interval that `auto` finds loses hardly more time than the best there is, in failures that are simulated."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.planner.cost.checkpoints import Save, best_interval_s, planned_interval_s
from megalite.resilience.checkpoint_interval import FailureHistory, IntervalPlanner


def lost_share(interval_s: float, cost_s: float, duration_s: float, gaps_s: np.ndarray) -> float:
    """Of all wall time, when the run fails after each of `gaps_s` and starts again from its last complete save.

    A save begins every `interval_s` of training, blocks for `cost_s`, and is complete `duration_s` after its beginning.
    """
    complete = np.floor((gaps_s - (duration_s - cost_s)) / (interval_s + cost_s)).clip(min=0)
    return float(1 - (complete * interval_s).sum() / gaps_s.sum())


@pytest.mark.parametrize("mean_s", [600.0, 3600.0, 24 * 3600.0])
@pytest.mark.parametrize("cost_s", [0.02, 1.0, 30.0, 300.0])
@pytest.mark.parametrize("in_background_s", [0.0, 40.0])
def test_no_other_interval_loses_noticeably_less(mean_s: float, cost_s: float, in_background_s: float) -> None:
    """Failures of a Poisson process, the same for all intervals tried. The 2% are the simulation's noise: a formula
    without the factor 2 under its root is outside."""
    gaps_s = np.random.default_rng(7).exponential(mean_s, 200_000)
    duration_s = cost_s + in_background_s
    ours_s = best_interval_s(cost_s, mean_s, duration_s)
    assert ours_s >= duration_s
    tried = [ours_s * factor for factor in np.geomspace(0.1, 10, 81) if ours_s * factor >= duration_s]
    losses = [lost_share(interval_s, cost_s, duration_s, gaps_s) for interval_s in tried]
    assert lost_share(ours_s, cost_s, duration_s, gaps_s) <= 1.02 * min(losses)
    assert max(losses) > 1.1 * min(losses), "every interval is as good: the test shows nothing"


def test_young_s_formula_where_saves_are_short() -> None:
    assert best_interval_s(2.0, 86400.0) == pytest.approx(math.sqrt(2 * 2.0 * 86400), rel=0.01)
    assert best_interval_s(30.0, 10.0) == 10.0  # a save longer than twice the MTBF: Daly's other branch
    assert best_interval_s(0.0, 3600.0, 12.0) == 12.0


@given(st.floats(0, 1e4), st.floats(1e-3, 1e8), st.floats(0, 1e4))
def test_an_interval_is_never_shorter_than_a_save_takes(cost_s: float, mean_s: float, duration_s: float) -> None:
    interval_s = best_interval_s(cost_s, mean_s, duration_s)
    assert math.isfinite(interval_s) and interval_s >= duration_s


def test_a_planned_interval_is_bounded() -> None:
    """From above by an hour, or what makes saves cost 1 %, and from below by what storage bears; each case is by
    another branch. 847 GB every 2.8 minutes, because a save hardly blocks, would be 440 TB a day."""
    day_s = 86400.0
    assert planned_interval_s(Save(2.0, 2.0), day_s) == best_interval_s(2.0, day_s) < 3600
    assert planned_interval_s(Save(20.0, 20.0), 250 * day_s) == 3600
    assert planned_interval_s(Save(300.0, 300.0), 250 * day_s) == 100 * 300
    assert planned_interval_s(Save(0.5, 5000.0), 250 * day_s) == 5000, "one save at a time is on its way"
    assert planned_interval_s(Save(30.0, 30.0), 10.0) == 10.0, "a save that blocks has no other beside it"
    assert planned_interval_s(Save(0.08, 20.0), 2 * day_s) == 900, "storage bears no more"
    assert planned_interval_s(Save(0.08, 5.0), 2 * day_s) == 500, "storage is fast: 1 % of its time"
    assert planned_interval_s(Save(0.08, 20.0), day_s / 4) == 0.02 * day_s / 4, "failures are frequent: 1 % of the work"


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(1e-3, 1e8))
def test_saves_under_the_bound_cost_at_most_a_hundredth_more(blocked_s: float, behind_s: float, mean_s: float) -> None:
    save = Save(blocked_s, blocked_s + behind_s)
    interval_s = planned_interval_s(save, mean_s)
    assert interval_s <= max(3600, 100 * blocked_s, save.duration_s)
    best_s = best_interval_s(blocked_s, mean_s, save.duration_s if save.duration_s > blocked_s else 0.0)
    assert interval_s == best_s or blocked_s <= 0.01 * interval_s * (1 + 1e-9)
    assert interval_s <= best_s or interval_s / 2 <= 0.01 * mean_s * (1 + 1e-9), "what the floor throws away"


def started(previous_s: float = 0.0, startup_s: float = 0.0) -> dict[str, object]:
    return {"event": "started", "previous_s": previous_s, "startup_s": startup_s}


def test_failures_are_sessions_that_trained_and_never_said_that_they_end() -> None:
    events: list[dict[str, object]] = [
        {"event": "started"},
        {"event": "saved"},
        started(1000, 100),  # the first was killed
        {"event": "preempted"},
        started(2000, 50),
        {"event": "hung"},
        started(500, 60),
        started(30, 30),  # killed before its first step
        {"event": "stopped"},
        started(400, 40),
    ]
    history = FailureHistory.of(events, None)
    assert (history.failures, history.trained_s) == (2, 900 + 1950 + 440 + 360)
    mean_s, source = history.mean_time_between_failures(350)
    assert mean_s == 2000 and source == "observed: 2 in 66.7 min"


def test_without_failures_a_stated_assumption_holds_until_the_run_has_shown_better() -> None:
    history = FailureHistory.of([{"event": "started"}], None)
    node_s = 24 * 3600 * 1000 / 4  # 4 failures in 1,000 days, as `megalite plan` assumes
    mean_s, source = history.mean_time_between_failures(1200)
    assert (mean_s, source) == (pytest.approx(node_s), "assumed for 1 node: none seen in 20 min")
    mean_s, source = FailureHistory.of([{"event": "started"}], None, 300).mean_time_between_failures(1200)
    assert (mean_s, source) == (pytest.approx(node_s / 300), "assumed for 300 nodes: none seen in 20 min")
    assert FailureHistory(nodes=300).mean_time_between_failures(80 * 3600) == (80 * 3600, "at most: none in 80 h")
    configured = FailureHistory.of([{"event": "started"}, started(10)], 3.0)
    assert configured.mean_time_between_failures(5) == (3 * 3600, "as configured")


class Steps:
    """A planner, and a clock that moves only with what it is told of."""

    def __init__(self, history: FailureHistory, say: Callable[[str], None] = print) -> None:
        self.now = 0.0
        self.planner = IntervalPlanner(history, say, clock=lambda: self.now)

    def step(self, step_s: float, between_s: float = 0.0) -> bool:
        self.now += step_s + between_s
        return self.planner.step(step_s)

    def saved(self, blocked_s: float, duration_s: float) -> None:
        self.now += blocked_s
        self.planner.saved(blocked_s, duration_s)


def test_ctrl_c_is_no_failure() -> None:
    events: list[dict[str, object]] = [{"event": "started"}, {"event": "interrupted"}, started(1000, 100)]
    assert FailureHistory.of(events, None).failures == 0


def test_what_comes_between_steps_counts_but_for_saves() -> None:
    """Steps of a second with evaluations of nine between them: a tenth of the steps makes the same interval."""
    steps = Steps(FailureHistory(configured_s=3600.0))
    steps.saved(blocked_s=0.5, duration_s=2.0)
    interval_s = planned_interval_s(Save(0.5, 2.0), 3600.0)
    due = []
    for step in range(200):
        if steps.step(1.0, between_s=9.0):
            due.append(step)
            steps.saved(blocked_s=0.5, duration_s=2.0)
    assert {later - earlier for earlier, later in pairwise(due)} == {math.ceil((interval_s - 0.5) / 10)}, (
        "half a step is rounding"
    )
    # a save that blocks as long as ten steps puts none of them off
    steps = Steps(FailureHistory(configured_s=3600.0))
    steps.saved(blocked_s=10.0, duration_s=10.0)
    interval_s = best_interval_s(10.0, 3600.0, 10.0)
    due = []
    for step in range(2000):
        if steps.step(1.0):
            due.append(step)
            steps.saved(blocked_s=10.0, duration_s=10.0)
    assert {later - earlier for earlier, later in pairwise(due)} <= {int(interval_s), int(interval_s) + 1}


def test_the_planner_measures_early_then_keeps_the_best_interval() -> None:
    said: list[str] = []
    planner = Steps(FailureHistory(configured_s=7200.0), said.append)
    due = []
    for step in range(1, 1000):
        if planner.step(1.5):
            due.append(step)
            assert len(due) == 1 or said
            planner.saved(blocked_s=1.0, duration_s=20.0)
    interval_s = planned_interval_s(Save(1.0, 20.0), 7200.0)
    assert interval_s > best_interval_s(1.0, 7200.0, 20.0)
    assert due[0] == 40, "a minute of training"
    assert {after - before for before, after in pairwise(due)} == {round(interval_s / 1.5)}
    assert said == [
        "checkpoint.interval auto: a save every 2.4 min (96 steps), the shortest that storage should bear, because one "
        "blocks 1 s and takes 20 s, and a failure is expected every 2 h (as configured)"
    ]
    for _ in range(5):
        planner.saved(blocked_s=1.3, duration_s=25.0)
    assert len(said) == 1, "14% more is not noticeable"
    for _ in range(5):
        planner.saved(blocked_s=9.0, duration_s=400.0)
    assert "a save every 6.67 min (267 steps), because" in said[-1] and "takes 6.67 min" in said[-1]
    assert sum(planner.step(1.5) for _ in range(534)) == 2


def test_a_first_save_that_fails_is_tried_again_ever_more_seldom() -> None:
    planner = Steps(FailureHistory())
    assert [step for step in range(1, 200) if planner.step(10.0)] == [6, 18, 42, 90, 186]
    planner = Steps(FailureHistory())
    due = [step for step in range(1, 1000) if planner.step(120.0)]
    assert due[0] == 1 and {later - earlier for earlier, later in pairwise(due[-9:])} == {30}, "an hour at most"


def test_the_first_save_waits_for_no_minute_where_runs_fail_sooner() -> None:
    planner = Steps(FailureHistory(configured_s=100.0))
    assert [step for step in range(1, 12) if planner.step(1.0)] == [10]


def test_a_run_of_less_than_a_minute_saves_only_at_its_end() -> None:
    planner = Steps(FailureHistory())
    assert not any(planner.step(0.05) for _ in range(1190))


@pytest.mark.parametrize("step_s", [1.0, 700.0, 10_000.0])
@pytest.mark.parametrize("blocked_s", [0.002, 3.0, 100.0])
def test_what_a_killed_run_loses_is_bounded_without_any_information(step_s: float, blocked_s: float) -> None:
    """At most an hour, or 100 times what a save blocks; half a step is rounding."""
    planner, since_s, longest_s = Steps(FailureHistory()), 0.0, 0.0
    for _ in range(int(40_000 / step_s) + 3):
        since_s += step_s
        longest_s = max(longest_s, since_s)
        if planner.step(step_s):
            since_s = 0.0
            planner.saved(blocked_s, blocked_s + 1)
    assert longest_s <= max(3600, 100 * blocked_s) + step_s


def test_a_save_for_another_reason_puts_the_next_one_off() -> None:
    planner = Steps(FailureHistory(configured_s=3600.0))
    planner.saved(blocked_s=0.5, duration_s=2.0)
    interval = round(planned_interval_s(Save(0.5, 2.0), 3600.0))
    assert not any(planner.step(1.0) for _ in range(interval - 1))
    planner.planner.began()
    assert not any(planner.step(1.0) for _ in range(interval - 1))
    assert planner.step(1.0)


def test_steps_longer_than_the_interval_are_each_saved() -> None:
    planner = Steps(FailureHistory(configured_s=60.0))
    planner.saved(blocked_s=0.01, duration_s=0.02)
    assert all(planner.step(30.0) for _ in range(5))


def test_one_slow_save_that_training_waits_for_does_not_set_the_interval() -> None:
    """In the background no save can begin before the slowest has ended; in the foreground none is on its way."""
    intervals_s = []
    for background in (False, True):
        planner = IntervalPlanner(FailureHistory(configured_s=50.0), print, background=background)
        for seconds in (1.0, 1.0, 1.0, 1.0, 60.0):
            planner.saved(blocked_s=seconds, duration_s=seconds)
        intervals_s.append(planner.interval_s())
    assert intervals_s[0] < 60 == intervals_s[1]
