"""Failure rates, checkpoints, intervals and lost hours: closed forms, published figures, what must hold anywhere."""

from __future__ import annotations

import csv
import math
import random
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.scaling_tutorial import first_order_shares
from megalite.config import ModelConfig
from megalite.config.errors import ConfigError
from megalite.planner.cost.checkpoints import (
    BYTES_PER_PARAMETER,
    PER_GPU,
    Contents,
    Save,
    Storage,
    best_interval_s,
    expected_ettr,
    megalite_bytes_per_parameter,
    time_shares,
    young_interval_s,
)
from megalite.planner.failure_rates import (
    DEFAULT_RATE,
    LLAMA_3,
    MISFITS,
    OBSERVATIONS,
    PUBLISHED_BAND,
    Components,
    failure_probability,
    mtbf_hours,
    rate_of_count,
    rate_of_mtbf,
    whole_nodes,
)
from megalite.planner.reliability.goodput_model import Reliability, at_scale, goodput_against_interval

PUBLISHED = Path(__file__).parents[5] / "benchmarks" / "published"
RATE = {row.system: row.rate_per_1000_node_days for row in OBSERVATIONS}

costs_s = st.floats(0.01, 600)
mtbfs_s = st.floats(1800, 1e8)


def rows(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


# rates


@given(st.floats(0.1, 100), st.integers(1, 20_000), st.integers(1, 50))
def test_mtbf_falls_as_one_over_the_number_of_nodes(rate: float, nodes: int, times: int) -> None:
    assert mtbf_hours(rate, nodes * times) == pytest.approx(mtbf_hours(rate, nodes) / times)


@given(st.floats(1e3, 1e7), st.floats(1e3, 1e7), st.floats(1e3, 1e7), st.floats(1e3, 1e7), st.integers(1, 16))
def test_a_node_fails_before_any_of_its_parts(gpu: float, nic: float, psu: float, node: float, gpus: int) -> None:
    components = Components(gpu, nic, psu, node, gpus_per_node=gpus)
    assert components.mttf_hours < min(gpu / gpus, nic / gpus, psu / 2, node)
    assert 1 / components.mttf_hours == pytest.approx(gpus / gpu + gpus / nic + 2 / psu + 1 / node)
    assert replace(components, redundant_psu=True).mttf_hours > components.mttf_hours
    assert mtbf_hours(components.rate_per_1000_node_days, 1) == pytest.approx(components.mttf_hours)


def test_what_never_fails_has_no_rate() -> None:
    never = Components(math.inf, math.inf, math.inf)
    assert never.mttf_hours == math.inf and never.rate_per_1000_node_days == 0
    with pytest.raises(ValueError, match="0"):
        mtbf_hours(0.0, 8)


@given(st.floats(0, 1), st.integers(0, 100_000))
def test_failure_probability_is_that_of_independent_nodes(probability: float, nodes: int) -> None:
    assert failure_probability(probability, nodes) == pytest.approx(1 - (1 - probability) ** nodes, abs=1e-10)


def test_failure_probability_keeps_its_figures_where_nodes_hardly_fail() -> None:
    """1 - (1 - p)^N in floats is 0 here, or wrong from its fourth figure."""
    assert failure_probability(1e-17, 1000) == pytest.approx(1e-14)
    assert failure_probability(0.01, 128) == pytest.approx(0.7237, abs=5e-5)
    assert failure_probability(1.0, 0) == 0.0 and failure_probability(1.0, 3) == 1.0


def test_llama_3_s_interruptions_are_a_rate_of_3_79() -> None:
    facts = {row["item"]: row["value"] for row in rows("llama3_reliability.csv")}
    failures, days, gpus = (int(facts[name]) for name in ("unexpected", "snapshot_days", "gpus"))
    assert (failures, days, gpus) == (419, 54, 16_384)
    assert round(rate_of_count(failures, gpus, days), 2) == 3.79 == round(RATE["Llama 3 405B"], 2)
    assert round(mtbf_hours(rate_of_count(failures, gpus, days), gpus // 8), 1) == 3.1


def test_llama_3_s_components_add_up_to_its_interruptions() -> None:
    """A wrong count of any category, or a part counted twice, leaves another total."""
    counted = rows("llama3_table5_interruptions.csv")
    by_gpu = sum(int(row["count"]) for row in counted if row["category"] == "GPU")
    by_nic = sum(int(row["count"]) for row in counted if row["component"] == "NIC")
    assert sum(int(row["count"]) for row in counted) == 419
    node_hours = 16_384 / 8 * 54 * 24
    per_node = LLAMA_3.failures_per_hour()
    assert per_node["GPU"] * node_hours == pytest.approx(by_gpu) and per_node["NIC"] * node_hours == pytest.approx(
        by_nic
    )
    assert LLAMA_3.rate_per_1000_node_days == pytest.approx(RATE["Llama 3 405B"])


def test_observations_are_those_of_the_committed_table() -> None:
    printed = {(row["source_system"], row["item"]): row["value"] for row in rows("reliability_observations.csv")}
    for name, system in (("RSC-1", "Meta RSC-1 (16k A100)"), ("RSC-2", "Meta RSC-2 (8k A100)")):
        assert RATE[f"{name}, A100"] == float(printed[system, "failure rate"].split()[0])
    assert printed["Meta RSC-1", "MTTF 1024-GPU job (measured)"] == "7.9 h"
    assert printed["Meta RSC-1", "MTTF 8-GPU job"] == "47.7 days"
    assert "about 1 per week on 384" in printed["BLOOM", "failures"] and round(RATE["BLOOM"], 1) == 3.0
    assert ">=35 manual + 70+ automatic in 2 months on 992" in printed["OPT-175B", "restarts"]
    assert round(RATE["OPT-175B"]) == 14
    assert all(row.source and row.reckoned for row in OBSERVATIONS)


def test_rsc_1_s_projections_follow_its_rate_and_its_measurements_do_not() -> None:
    assert mtbf_hours(RATE["RSC-1, A100"], 16_384 // 8) == pytest.approx(1.8, abs=0.05)
    assert mtbf_hours(RATE["RSC-1, A100"], 131_072 // 8) == pytest.approx(0.23, abs=0.005)
    assert round(rate_of_mtbf(7.9, 1024)) == 24 and "about 24" in MISFITS
    assert round(rate_of_mtbf(47.7 * 24, 8)) == 21 and "about 21" in MISFITS


def test_the_default_lies_in_the_band() -> None:
    assert PUBLISHED_BAND == (2.0, 14.0) and PUBLISHED_BAND[0] < DEFAULT_RATE == 4.0 < PUBLISHED_BAND[1]


@pytest.mark.parametrize(("gpus", "nearest"), [(100, "96 or 104"), (4, "take 8,"), (1020, "1016 or 1024")])
def test_gpus_that_fill_no_nodes_get_the_nearest_counts(gpus: int, nearest: str) -> None:
    with pytest.raises(ConfigError, match=nearest):
        whole_nodes(gpus, 8)
    assert whole_nodes(1024, 8) == 128


# checkpoints


def test_bytes_of_a_checkpoint_are_the_sum_of_its_tensors() -> None:
    assert BYTES_PER_PARAMETER == {Contents.MASTERS: 12, Contents.MIXED: 2 + 12, Contents.GRADIENTS: 4 + 12}
    sizes = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1}
    model = ModelConfig.model_validate(sizes | {"num_attention_heads": 2})
    matrices, whole = 4 * 16 + 3 * 32, 4 * 16 + 3 * 32 + 2 * 40 + 3 * 4
    expected = {"adamw": 12, "sgd": 4, "muon": 12 - 4 * matrices / whole}
    assert {name: megalite_bytes_per_parameter(name, model) for name in expected} == pytest.approx(expected)


def test_writers_share_the_bytes_until_storage_is_the_limit() -> None:
    size = 988.4e9
    seconds = {
        writers: Storage(writers=writers, storage_bytes_per_s=500e9).save(size, 1024, 128).duration_s
        for writers in (1, 2, "nodes", "gpus")
    }
    assert seconds[1] == pytest.approx(141.2) and seconds[2] == pytest.approx(70.6)
    assert seconds["nodes"] == seconds["gpus"] == pytest.approx(988.4 / 500)
    assert Storage(writers=PER_GPU, storage_bytes_per_s=None).save(size, 8, 1).duration_s == pytest.approx(141.2 / 8)
    assert Storage(writers=64).writers_on(8, 1) == 8, "a writer without a GPU has nothing to write"


@given(st.floats(1e6, 1e13), st.integers(1, 500), st.booleans())
def test_more_nodes_never_write_slower(size: float, nodes: int, background: bool) -> None:
    storage = Storage(background=background)
    few, many = storage.save(size, 8 * nodes, nodes), storage.save(size, 16 * nodes, 2 * nodes)
    assert many.duration_s <= few.duration_s and many.blocked_s <= few.blocked_s
    assert few.blocked_s <= few.duration_s


def test_a_background_save_blocks_for_the_copy_alone() -> None:
    blocking, behind = Storage().save(8e11, 64, 8), Storage(background=True).save(8e11, 64, 8)
    assert blocking.blocked_s == blocking.duration_s == pytest.approx(8e11 / 56e9)
    assert behind.blocked_s == pytest.approx(8e11 / 64 / 10e9)
    assert behind.duration_s == pytest.approx(blocking.duration_s + behind.blocked_s)


# intervals and shares


@given(costs_s, mtbfs_s, st.floats(1, 1e5), st.floats(0, 3600), st.floats(0, 3600))
def test_shares_add_up_to_all_time(cost: float, mtbf: float, interval: float, behind: float, restart: float) -> None:
    shares = time_shares(interval, Save(cost, cost + behind), mtbf, restart)
    parts = (shares.productive, shares.writes, shares.rework, shares.restarts)
    assert sum(parts) == pytest.approx(1.0) and all(0 <= part <= 1 for part in parts)
    assert shares.writes == pytest.approx(shares.productive * cost / interval)


def daly_wall_time_s(work_s: float, interval_s: float, cost_s: float, mtbf_s: float, restart_s: float) -> float:
    """Daly 2006: M e^(R/M) (e^((tau+delta)/M) - 1) Ts / tau."""
    segment = math.expm1((interval_s + cost_s) / mtbf_s)
    return mtbf_s * math.exp(restart_s / mtbf_s) * segment * work_s / interval_s


@given(costs_s, mtbfs_s, st.floats(0.02, 3), st.floats(0, 1800))
def test_a_blocking_save_costs_what_daly_s_complete_model_says(
    cost: float, mtbf: float, times: float, restart: float
) -> None:
    interval = times * young_interval_s(cost, mtbf)
    productive = time_shares(interval, Save(cost, cost), mtbf, restart).productive
    assert productive == pytest.approx(1 / daly_wall_time_s(1.0, interval, cost, mtbf, restart))


def exact_best_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The zero of the derivative of Daly's wall time: (1 - tau/M) e^((tau+delta)/M) = 1."""
    low, high = 0.0, mtbf_s
    for _ in range(200):
        middle = (low + high) / 2
        if (1 - middle / mtbf_s) * math.exp((middle + cost_s) / mtbf_s) > 1:
            low = middle
        else:
            high = middle
    return low


@given(st.floats(1e-5, 0.5), mtbfs_s)
def test_the_higher_order_interval_is_near_the_exact_optimum(ratio: float, mtbf: float) -> None:
    """Within 2% of the interval itself for saves of up to half the MTBF, where Young's is off by up to 40%; and what it
    loses more is nothing that could be measured."""
    cost = ratio * mtbf
    ours, exact = best_interval_s(cost, mtbf), exact_best_interval_s(cost, mtbf)
    assert ours == pytest.approx(exact, rel=0.02)
    wall, least = (daly_wall_time_s(1.0, interval, cost, mtbf, 0.0) for interval in (ours, exact))
    assert least <= wall * (1 + 1e-9) and wall <= least * 1.0001


def test_young_s_interval_is_not_where_a_save_is_long() -> None:
    cost, mtbf = 1800.0, 3600.0
    assert young_interval_s(cost, mtbf) > 1.3 * exact_best_interval_s(cost, mtbf)


@given(costs_s, st.floats(1e5, 1e8))
def test_young_and_daly_agree_where_a_save_is_short(cost: float, mtbf: float) -> None:
    assert best_interval_s(cost, mtbf) == pytest.approx(young_interval_s(cost, mtbf), rel=math.sqrt(cost / mtbf))


@given(st.floats(1, 60), st.floats(1e5, 1e8), st.floats(0, 600))
def test_first_order_and_complete_model_agree_where_little_is_lost(cost: float, mtbf: float, restart: float) -> None:
    interval, save = young_interval_s(cost, mtbf), Save(cost, cost)
    complete, first = (shares(interval, save, mtbf, restart) for shares in (time_shares, first_order_shares))
    lost = 1 - first.productive
    assert complete.productive == pytest.approx(first.productive, abs=2 * lost**2)
    assert complete.writes == pytest.approx(first.writes, abs=2 * lost**2)
    assert complete.restarts == pytest.approx(first.restarts, abs=2 * lost**2)


@given(st.floats(1, 60), st.floats(1e5, 1e8), st.floats(0, 600))
def test_meta_s_closed_form_agrees_where_little_is_lost(cost: float, mtbf: float, restart: float) -> None:
    interval, save = young_interval_s(cost, mtbf), Save(cost, cost)
    exact = time_shares(interval, save, mtbf, restart).productive
    assert expected_ettr(interval, save, mtbf, restart) == pytest.approx(exact, abs=2 * (1 - exact) ** 2)


def test_meta_s_closed_form_as_printed() -> None:
    """(1 - N r (u0 + dt/2)) / (1 + w/dt), with N r one failure in 10 h."""
    printed = (1 - (300 + 1800 / 2) / 36_000) / (1 + 60 / 1800)
    assert expected_ettr(1800.0, Save(60.0, 60.0), 36_000.0, 300.0) == pytest.approx(printed)
    assert expected_ettr(1e9, Save(60.0, 60.0), 36_000.0, 300.0) == 0.0


@pytest.mark.parametrize("behind_s", [0.0, 200.0])
def test_shares_are_those_of_simulated_failures(behind_s: float) -> None:
    """Every fourth restart fails too: a formula that forgets it, or that counts a save as complete when it begins, is
    outside of the 0.5 points that 40,000 failures leave of noise."""
    mtbf, restart, interval, save = 3600.0, 900.0, 1000.0, Save(60.0, 60.0 + behind_s)
    chance = random.Random(3)
    clock = kept = down = 0.0
    for _ in range(40_000):
        gap = chance.expovariate(1 / mtbf)
        complete = max(0, math.floor((gap - behind_s) / (interval + save.blocked_s)))
        kept += complete * interval
        clock += gap
        while (failed := chance.expovariate(1 / mtbf)) < restart:
            down += failed
        down += restart
    shares = time_shares(interval, save, mtbf, restart)
    assert shares.productive == pytest.approx(kept / (clock + down), abs=0.005)
    assert shares.restarts == pytest.approx(down / (clock + down), abs=0.005)


def test_a_job_that_never_finishes_an_interval_gets_nothing_done() -> None:
    shares = time_shares(1e9, Save(1.0, 1.0), 60.0, 0.0)
    assert (shares.productive, shares.rework) == (0.0, 1.0)


# a job at its scale

jobs = st.builds(
    Reliability,
    rate_per_1000_node_days=st.floats(0.5, 20),
    parameters=st.floats(1e8, 1e12),
    days=st.floats(1, 90),
    restart_s=st.floats(0, 1200),
    communication_share=st.floats(0, 0.9),
    storage=st.builds(Storage, background=st.booleans()),
)


@given(jobs, st.integers(1, 4096))
def test_hours_add_up_and_the_band_holds_what_lies_in_it(job: Reliability, nodes: int) -> None:
    scale = at_scale(job, 8 * nodes)
    assert sum(scale.hours.values()) == pytest.approx(job.days * 24)
    assert scale.hours["communication"] + scale.hours["computation"] == pytest.approx(job.days * 24 * scale.goodput)
    assert scale.expected_failures == pytest.approx(job.days * 24 / scale.mtbf_hours)
    worse, better = scale.goodput_at_high_rate, scale.goodput_at_low_rate
    assert worse <= better
    low, high = PUBLISHED_BAND
    if low <= job.rate_per_1000_node_days <= high:
        assert scale.mtbf_hours_at_high_rate * (1 - 1e-9) <= scale.mtbf_hours
        assert scale.mtbf_hours <= scale.mtbf_hours_at_low_rate * (1 + 1e-9)
        assert worse - 1e-9 <= scale.goodput <= better + 1e-9


@given(jobs, st.integers(1, 2048))
def test_twice_the_nodes_fail_twice_as_often_and_save_more_often(job: Reliability, nodes: int) -> None:
    one_writer = replace(job, storage=Storage(writers=1))
    small, large = at_scale(one_writer, 8 * nodes), at_scale(one_writer, 16 * nodes)
    assert large.expected_failures == pytest.approx(2 * small.expected_failures)
    assert large.failure_probability_per_day > small.failure_probability_per_day or math.isclose(
        small.failure_probability_per_day, 1.0
    )
    assert large.interval_s <= small.interval_s * (1 + 1e-9) or large.save_blocked_s > 0.1 * large.mtbf_hours * 3600
    assert large.goodput <= small.goodput + 1e-9


def test_a_llama_3_sized_run_reaches_what_it_published() -> None:
    """More than 90% effective training time, in spite of a failure every 3 hours."""
    job = Reliability(RATE["Llama 3 405B"], parameters=405e9, days=54, storage=Storage(storage_bytes_per_s=2e12))
    scale = at_scale(job, 16_384)
    assert scale.expected_failures == pytest.approx(419) and scale.goodput > 0.9


@pytest.mark.parametrize("background", [False, True])
def test_the_curve_over_intervals_is_highest_at_the_best_one(background: bool) -> None:
    job = Reliability(storage=Storage(writers=4, background=background), interval_s=7.0)
    points, best_s = goodput_against_interval(job, 1024), at_scale(replace(job, interval_s=None), 1024).interval_s
    highest, planned = max(points, key=lambda point: point.goodput), at_scale(replace(job, interval_s=None), 1024)
    if background:  # saves hardly block, and storage bears no more of them
        assert best_s == 900 > highest.interval_s and planned.goodput > highest.goodput - 0.01
    else:
        assert highest.interval_s == pytest.approx(best_s, rel=0.15)
    assert [point.interval_s for point in points] == sorted(point.interval_s for point in points)
    assert points[-1].interval_s == pytest.approx(30 * best_s) and points[-1].goodput < highest.goodput
    own = at_scale(job, 1024)
    assert any(point.interval_s == own.interval_s for point in points), "it can be marked"
    assert points[0].interval_s == pytest.approx(own.save_duration_s if background else 7.0)
    assert all(point.goodput_at_high_rate <= point.goodput <= point.goodput_at_low_rate for point in points)


def test_goodput_falls_with_the_number_of_gpus() -> None:
    job, gpus = Reliability(storage=Storage(writers=1)), [8 * 2**power for power in range(12)]
    points = [at_scale(job, count) for count in gpus]
    assert all(before.goodput > after.goodput for before, after in pairwise(points))


def test_background_saves_lose_less_than_blocking_ones() -> None:
    blocking, behind = (at_scale(Reliability(storage=Storage(1, background=b)), 1024) for b in (False, True))
    assert behind.hours["writes"] < blocking.hours["writes"] and behind.goodput > blocking.goodput
    assert behind.interval_s >= behind.save_duration_s, "one save at a time is on its way"
