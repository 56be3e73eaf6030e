"""Efficiency against published numbers, and the loss against what a network with half the bandwidth must do."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import pytest

from launch.experiments.efficiency import ScaledPoint, ScalingPoint, efficiency, scaled
from launch.experiments.measurement import RunMeasurement
from tests.unit.launch.experiments.conftest import MeasuredRun

PUBLISHED = Path(__file__).parents[4] / "benchmarks" / "published" / "megatron_core_h100_weak_scaling.csv"
H100_TFLOPS = 989.0  # of its data sheet, in bf16, by which Megatron's table counts


def test_megatrons_weak_scaling_is_reproduced_to_the_digit() -> None:
    """Rates of all GPUs together give the table's utilization, if efficiency is by rank and the first row's is known.

    A ratio that is taken the wrong way round, or of the rates of all GPUs, is far off in every row but the first.
    """
    with PUBLISHED.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 9
    gpus = [int(row["gpus"]) for row in rows]
    rates = [float(row["tflops_per_gpu"]) * count for row, count in zip(rows, gpus, strict=True)]
    for row, count, rate in zip(rows, gpus, rates, strict=True):
        assert round(rate / 1e3, 1) == float(row["aggregate_pflops"]), row["model"]
        found = efficiency(count, rate, gpus[0], rates[0])
        assert round(100 * found * float(rows[0]["tflops_per_gpu"]) / H100_TFLOPS) == int(row["MFU_pct"]), row["model"]


def point(measured_run: MeasuredRun, name: str, ranks: int, **parts_s: float) -> ScalingPoint:
    """A point of strong scaling, whose global batch is always 8."""
    run = RunMeasurement.read(measured_run(name, parts_s, data_parallel_size=ranks), 2)
    return ScalingPoint(f"{ranks} ranks", ranks, (run,))


def test_the_parts_of_the_loss_add_up_to_it(measured_run: MeasuredRun) -> None:
    points = [
        point(measured_run, "one", 1, forward=0.4, backward=0.8, optimizer=0.1),
        point(measured_run, "two", 2, forward=0.21, backward=0.42, optimizer=0.05, gradient_sync=0.13),
        point(measured_run, "four", 4, forward=0.1, backward=0.25, optimizer=0.01, gradient_sync=0.20, data=0.03),
    ]
    for one in scaled(points):
        assert sum(one.loss_by_part.values()) == pytest.approx(1 - one.efficiency, abs=1e-12)
    four = scaled(points)[2]
    assert four.efficiency == pytest.approx(1.3 / (4 * 0.59))
    # by hand: (4 x part - part of one rank) / (4 x 0.59)
    assert four.loss_by_part["gradient_sync"] == pytest.approx(0.8 / 2.36)
    assert four.loss_by_part["optimizer"] == pytest.approx((0.04 - 0.1) / 2.36)
    assert four.sentence() == (
        "4 ranks: efficiency 55 %: of 47 points lost, 34 to gradient synchronisation, 8 to backward, 5 to data; 3 "
        "won back, most of it in optimizer"
    )


def test_half_the_bandwidth_doubles_the_loss_to_gradient_synchronisation(measured_run: MeasuredRun) -> None:
    """Two clusters that differ in their network alone: nothing else may be blamed."""
    one = point(measured_run, "one", 1, forward=0.4, backward=0.8)
    found = {}
    for name, sync_s in (("full", 0.1), ("half", 0.2)):
        two = ScaledPoint.of(point(measured_run, name, 2, forward=0.2, backward=0.4, gradient_sync=sync_s), one)
        assert {part for part, lost in two.loss_by_part.items() if abs(lost) > 1e-9} == {"gradient_sync"}
        found[name] = two
    assert "of 14 points lost, 14 to gradient synchronisation" in found["full"].sentence()
    assert "of 25 points lost, 25 to gradient synchronisation" in found["half"].sentence()
    cost = {name: two.point.cost_by_part["gradient_sync"] for name, two in found.items()}
    assert cost["half"] == pytest.approx(2 * cost["full"])


def test_ideal_scaling_loses_nothing(measured_run: MeasuredRun) -> None:
    points = [point(measured_run, f"run{ranks}", ranks, forward=0.8 / ranks) for ranks in (1, 2, 4, 8)]
    for one in scaled(points):
        assert one.efficiency == pytest.approx(1.0)
        assert one.ideal_tokens_per_s == pytest.approx(one.point.tokens_per_s)
        assert one.sentence().endswith("efficiency 100 %: nothing is lost")
    for before, after in pairwise(scaled(points)):
        assert after.point.tokens_per_s == pytest.approx(2 * before.point.tokens_per_s)


def test_the_prediction_is_scaled_like_the_measurement(measured_run: MeasuredRun) -> None:
    points = []
    for ranks, predicted_s in ((1, 0.5), (2, 0.4)):
        folder = measured_run(str(ranks), {"forward": 1 / ranks}, data_parallel_size=ranks, predicted_s=predicted_s)
        points.append(ScalingPoint(f"{ranks} ranks", ranks, (RunMeasurement.read(folder, 2),)))
    two = scaled(points)[1]
    assert two.predicted_efficiency == pytest.approx(0.5 / (2 * 0.4)) and two.efficiency == pytest.approx(1.0)
