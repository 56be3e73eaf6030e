"""Simulated runs against what must hold of any run, against closed forms, and against what large runs published."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.planner.simulation import Check, Relation, simulated_best_interval_s, waiting_share
from megalite.config import ConfigError
from megalite.planner.cost.checkpoints import Save, time_shares
from megalite.planner.failure_rates import failure_probability
from megalite.planner.reliability.run_simulation import (
    DAY_S,
    HOUR_S,
    PARTS,
    SimulatedJob,
    Spread,
    expected_maximum,
    expected_slowdown,
    simulate,
    spare_nodes_for,
    summarise,
)

RUN = SimulatedJob(
    nodes=2048,
    duration_s=30 * DAY_S,
    interval_s=1200.0,
    save=Save(60.0, 60.0),
    rate_per_1000_node_days=4.0,
    detection_s=120.0,
    restart_s=300.0,
)


@st.composite
def runs(draw: st.DrawFn) -> SimulatedJob:
    """Of all kinds, a few hundred failures at most."""
    blocked_s = draw(st.floats(0, 600))
    return SimulatedJob(
        nodes=draw(st.integers(1, 5000)),
        duration_s=draw(st.floats(0.1, 20)) * DAY_S,
        interval_s=draw(st.floats(60, 20_000)),
        save=Save(blocked_s, blocked_s + draw(st.floats(0, 3000))),
        rate_per_1000_node_days=draw(st.floats(0, 14)),
        detection_s=draw(st.floats(0, 1000)),
        hang_share=draw(st.floats(0, 1)),
        hang_timeout_s=draw(st.floats(0, 4000)),
        restart_s=draw(st.floats(0, 4000)),
        lost_node_share=draw(st.floats(0, 1)),
        spare_nodes=draw(st.none() | st.integers(0, 10)),
        repair_s=draw(st.floats(0, 3)) * DAY_S,
        infant_mortality_shape=draw(st.floats(0.5, 2)),
        slow_node_share=draw(st.floats(0, 0.1)),
        slow_node_slowdown=draw(st.floats(0, 0.5)),
        step_jitter=draw(st.floats(0, 0.1)),
    )


ROUNDED = SimulatedJob(
    nodes=222, duration_s=DAY_S, interval_s=461.4774173486062, save=Save(0.0, 0.0), detection_s=0.0, restart_s=0.0
)


@settings(max_examples=60, deadline=None)
@given(runs(), st.integers(0, 10))
@example(replace(ROUNDED, rate_per_1000_node_days=12.0), 0)  # its parts add up to more than the whole
def test_every_hour_is_accounted_for_once(run: SimulatedJob, seed: int) -> None:
    outcome = simulate(run, seed)
    assert tuple(outcome.hours) == PARTS
    assert all(hours >= 0 for hours in outcome.hours.values())
    assert outcome.total_hours == pytest.approx(run.duration_s / HOUR_S)
    each = outcome.interruptions
    for part, costs_s in {
        "rework": [one.rework_s for one in each],
        "detection": [one.detection_s for one in each],
        "waiting for nodes": [one.waiting_s for one in each],
        "restart": [one.restart_s for one in each],
    }.items():
        assert outcome.hours[part] * HOUR_S == pytest.approx(sum(costs_s), abs=1e-6)
    assert [one.at_s for one in each] == sorted(one.at_s for one in each)
    assert all(0 <= one.at_s < run.duration_s for one in each)


@settings(max_examples=20, deadline=None)
@given(runs(), st.integers(0, 10))
def test_a_seed_is_a_run(run: SimulatedJob, seed: int) -> None:
    assert simulate(run, seed) == simulate(run, seed)


@pytest.mark.parametrize("shape", [0.001, 0.1, 100.0])
@pytest.mark.parametrize("rate", [1e-300, 1e-3, 4.0])
def test_extreme_shapes_and_rates_end(shape: float, rate: float) -> None:
    run = replace(RUN, infant_mortality_shape=shape, rate_per_1000_node_days=rate, slow_node_share=1e-310)
    assert simulate(run).total_hours == pytest.approx(720)


def test_seeds_differ() -> None:
    assert simulate(RUN, 0).hours != simulate(RUN, 1).hours


def test_without_failures_only_checkpoints_cost() -> None:
    outcome = simulate(replace(RUN, rate_per_1000_node_days=0.0))
    assert outcome.interruptions == ()
    assert outcome.goodput == pytest.approx(1200 / 1260, abs=1e-3)
    assert outcome.checkpoints == int(RUN.duration_s / 1260)


def _slowly(run: SimulatedJob, elapsed_s: float) -> tuple[float, float]:
    """What `trained_and_saved_s` says, checkpoint by checkpoint."""
    at_s = trained_s = saved_s = 0.0
    while True:
        train_s = run.cycle_s - run.save.blocked_s
        if at_s + train_s >= elapsed_s:
            return trained_s + elapsed_s - at_s, saved_s
        at_s, trained_s = at_s + train_s, trained_s + train_s
        if at_s + run.save.duration_s <= elapsed_s:
            saved_s = trained_s
        at_s += run.save.blocked_s
        if at_s >= elapsed_s:
            return trained_s, saved_s


@given(st.floats(1, 1000), st.floats(0, 200), st.floats(0, 1500), st.floats(0, 5000))
def test_a_stretch_without_failures_is_what_its_checkpoints_make_it(
    interval_s: float, blocked_s: float, behind_s: float, elapsed_s: float
) -> None:
    """Also where a checkpoint is still being written at the end, or one has to wait for the one before it."""
    run = replace(RUN, interval_s=interval_s, save=Save(blocked_s, blocked_s + behind_s))
    trained_s, saved_s = run.trained_and_saved_s(elapsed_s)
    slow_trained_s, slow_saved_s = _slowly(run, elapsed_s)
    assert trained_s == pytest.approx(slow_trained_s, abs=1e-6)
    is_just_now = min(abs(math.remainder(elapsed_s - blocked_s - behind_s - interval_s, run.cycle_s)), 1.0) < 1e-6
    assert is_just_now or saved_s == pytest.approx(slow_saved_s, abs=1e-6)
    assert 0 <= saved_s <= trained_s + 1e-6 and trained_s <= elapsed_s + 1e-6


def test_a_failure_during_a_background_write_goes_back_to_the_checkpoint_before() -> None:
    run = replace(RUN, interval_s=100.0, save=Save(10.0, 60.0))
    # trains to 100, saves until 160 (blocked until 110), trains to 210, saves until 270
    assert run.trained_and_saved_s(159.0) == pytest.approx((149.0, 0.0))
    assert run.trained_and_saved_s(161.0) == pytest.approx((151.0, 100.0))
    assert run.trained_and_saved_s(269.0) == pytest.approx((249.0, 100.0))
    assert run.trained_and_saved_s(271.0) == pytest.approx((251.0, 200.0))


def test_failures_come_as_often_as_the_rate_says() -> None:
    """Detection is not under load: nothing fails then."""
    run = replace(RUN, duration_s=3000 * DAY_S)
    outcome = simulate(run)
    under_load = 1 - outcome.hours["detection"] / outcome.total_hours
    expected = 2048 * 0.004 * 3000 * under_load
    assert len(outcome.interruptions) == pytest.approx(expected, abs=4 * math.sqrt(expected))


def test_hangs_wait_for_the_timeout() -> None:
    run = replace(RUN, duration_s=1000 * DAY_S, hang_share=0.25, hang_timeout_s=1800.0)
    outcome = simulate(run)
    hangs = sum(one.is_hang for one in outcome.interruptions)
    assert hangs / len(outcome.interruptions) == pytest.approx(0.25, abs=0.02)
    assert {one.detection_s for one in outcome.interruptions[:-1]} == {120.0, 1800.0}
    assert all((one.detection_s == 1800.0) == one.is_hang for one in outcome.interruptions[:-1])


def test_a_failure_during_a_restart_begins_another_outage() -> None:
    """A restart of 3 MTBF succeeds one time in e^3."""
    run = replace(RUN, nodes=1, duration_s=1e6, rate_per_1000_node_days=DAY_S, interval_s=100.0, restart_s=3000.0)
    outcome = simulate(run)
    done = sum(one.restart_s == 3000.0 for one in outcome.interruptions)
    assert done / len(outcome.interruptions) == pytest.approx(math.exp(-3), rel=0.3)


def test_without_a_spare_node_a_failure_waits_for_its_repair() -> None:
    run = replace(RUN, nodes=16, duration_s=1000 * DAY_S, spare_nodes=0, repair_s=6 * HOUR_S)
    outcome = simulate(run)
    assert len(outcome.interruptions) > 20
    assert {one.waiting_s for one in outcome.interruptions[:-1]} == {6 * HOUR_S}
    restarts_where_it_was = simulate(replace(run, lost_node_share=0.0))
    assert restarts_where_it_was.hours["waiting for nodes"] == 0


def test_more_spare_nodes_never_wait_longer() -> None:
    waits = [simulate(replace(RUN, spare_nodes=spare)).hours["waiting for nodes"] for spare in (2, 6, 10, 20)]
    assert waits == sorted(waits, reverse=True) and waits[0] > 0
    always = simulate(replace(RUN, spare_nodes=None))
    assert simulate(replace(RUN, spare_nodes=1000)).hours == always.hours


@given(st.integers(0, 40), st.floats(0.01, 50))
def test_spare_nodes_for_a_share_are_the_fewest(spare: int, under_repair: float) -> None:
    share = waiting_share(spare, under_repair)
    fewest = spare_nodes_for(share, under_repair)
    assert fewest <= spare and waiting_share(fewest, under_repair) <= share * (1 + 1e-12)
    assert fewest == 0 or waiting_share(fewest - 1, under_repair) > share


def test_erlang_b_is_as_tabulated() -> None:
    """10 erlangs offered to 10 lines: 21.5 % blocked; without a spare node it is rho / (1 + rho)."""
    assert waiting_share(9, 10.0) == pytest.approx(0.2146, abs=1e-4)
    assert waiting_share(0, 0.25) == pytest.approx(0.2)


def test_infant_mortality_moves_failures_to_the_start() -> None:
    """The number expected is the same; with shape k, half as much time sees 2^-k of it."""
    run = replace(RUN, duration_s=1000 * DAY_S, detection_s=0.0)
    for shape in (0.5, 1.0):
        failures = simulate(replace(run, infant_mortality_shape=shape)).interruptions
        assert len(failures) == pytest.approx(run.expected_failures, rel=0.05)
        early = sum(one.at_s < run.duration_s / 2 for one in failures)
        assert early / len(failures) == pytest.approx(0.5**shape, abs=0.02)


@pytest.mark.parametrize(
    ("count", "expected"), [(1, 0.0), (2, 1 / math.sqrt(math.pi)), (10, 1.53875), (100, 2.50759), (1000, 3.24144)]
)
def test_the_largest_of_n_is_as_tabulated(count: int, expected: float) -> None:
    """Tippett 1925 for 100 and 1000; Harter 1961 for 10."""
    assert expected_maximum(count) == pytest.approx(expected, abs=1e-5)


@given(st.integers(1, 100_000), st.floats(0, 0.5), st.floats(0, 0.2), st.data())
def test_the_slowest_node_sets_the_pace(nodes: int, slow_by: float, jitter: float, data: st.DataObject) -> None:
    slow = data.draw(st.integers(0, nodes))
    slowdown = expected_slowdown(nodes, slow, slow_by, jitter)
    assert slowdown >= 1 + slow_by * (slow > 0) - 1e-9
    spread = math.sqrt(2 * math.log(nodes)) * jitter  # of the largest of N, from above
    assert slowdown <= 1 + slow_by * (slow > 0) + spread + 1e-3


def test_the_slowest_of_a_mixture_is_what_trying_finds() -> None:
    chance = Random(0)
    tried = fmean(max(chance.gauss(1 + 0.05 * (node < 2), 0.03) for node in range(20)) for _ in range(20_000))
    assert expected_slowdown(20, 2, 0.05, 0.03) == pytest.approx(tried, abs=5e-4)


def test_stragglers_slow_every_step() -> None:
    run = replace(RUN, slow_node_share=1.0, slow_node_slowdown=0.25)
    slow, usual = simulate(run), simulate(RUN)
    assert slow.goodput == pytest.approx(usual.goodput / 1.25)
    assert slow.effective_training_time == pytest.approx(usual.effective_training_time)
    assert slow.hours["stragglers"] == pytest.approx(0.25 * slow.hours["useful"])


def test_rare_slow_nodes_are_in_some_runs_only() -> None:
    """One in 2,048 on average: 63 % of runs begin with at least one."""
    assert failure_probability(1 / 2048, 2048) == pytest.approx(1 - math.exp(-1), abs=1e-3)
    run = replace(RUN, rate_per_1000_node_days=0.0, slow_node_share=1 / 2048, slow_node_slowdown=0.1)
    slowed = [simulate(run, seed).hours["stragglers"] > 0 for seed in range(400)]
    assert fmean(slowed) == pytest.approx(0.632, abs=0.07)


def test_the_best_interval_is_found_where_the_closed_form_is_best() -> None:
    """Against the optimum of the complete model itself, which no approximation goes into."""
    run = replace(RUN, duration_s=300 * DAY_S, detection_s=0.0)
    mtbf_s = run.mean_time_between_failures_s
    candidates = [100 * 1.01**power for power in range(600)]
    exact_s = max(candidates, key=lambda each: time_shares(each, run.save, mtbf_s, run.restart_s).productive)
    found_s = simulated_best_interval_s(run, 60.0, 20_000.0, seeds=range(2))
    assert found_s == pytest.approx(exact_s, rel=0.10)


def test_no_interval_below_a_background_write_is_tried() -> None:
    run = replace(RUN, save=Save(1.0, 2000.0))
    assert simulated_best_interval_s(run, 60.0, 20_000.0, seeds=range(1)) >= 1999.0


def test_a_hundred_thousand_gpus_and_ninety_days_take_seconds() -> None:
    run = replace(RUN, nodes=12_500, duration_s=90 * DAY_S, rate_per_1000_node_days=14.0, step_jitter=0.01)
    started = time.perf_counter()
    outcome = simulate(run)
    assert len(outcome.interruptions) > 10_000
    assert time.perf_counter() - started < 3  # 0.07 s where nothing else runs


def test_a_summary_is_of_all_seeds() -> None:
    outcomes = [simulate(RUN, seed) for seed in range(5)]
    summary = summarise(outcomes)
    assert summary.seeds == 5
    assert summary.goodput.mean == pytest.approx(fmean(outcome.goodput for outcome in outcomes))
    assert summary.goodput.low <= summary.goodput.mean <= summary.goodput.high and summary.goodput.deviation > 0
    assert sum(spread.mean for spread in summary.hours.values()) == pytest.approx(RUN.duration_s / HOUR_S)
    assert Spread.of([3.0]) == Spread(3.0, 0.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 0}, "nodes is 0"),
        ({"duration_s": math.inf}, "duration_s is inf"),
        ({"interval_s": 0.0}, "interval_s is 0"),
        ({"restart_s": -1.0}, "restart_s is -1"),
        ({"hang_share": 1.5}, "between 0 and 1"),
        ({"rate_per_1000_node_days": 1e9}, "take fewer nodes, fewer days or a lower rate"),
    ],
)
def test_an_impossible_run_is_one_sentence(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        replace(RUN, **changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("relation", "ours", "passes"),
    [
        (Relation.RELATIVE, 1.09, True),
        (Relation.RELATIVE, 1.11, False),
        (Relation.ABSOLUTE, 0.89, False),
        (Relation.AT_LEAST, 0.99, False),
        (Relation.SHOWN, 9.0, True),
    ],
)
def test_a_check_fails_outside_its_bound(relation: Relation, ours: float, passes: bool) -> None:
    assert Check("x", ours, 1.0, 0.1, relation).passes == passes
