"""What rounds of runs may be said to show: a planted difference is found, and noise is not taken for one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch.errors import LaunchError
from launch.experiments.bench_table import bench_table, conclusion, verdict
from launch.experiments.comparison import PointResult, compare
from launch.experiments.measurement import RunMeasurement
from launch.experiments.series import SeriesPoint
from launch.experiments.series_runs import SeriesResults
from tests.unit.launch.experiments.conftest import MeasuredRun

BUSY = (1.0, 1.6, 1.1)  # how slow the machine was in each round, for all variants alike
NOISE = {"a": (1.00, 1.02, 0.99), "b": (1.01, 0.99, 1.00)}


def results(measured_run: MeasuredRun, seconds: dict[str, tuple[float, ...]]) -> list[PointResult]:
    """The comparison of variants whose steps took `seconds` in each round, nine tenths of them forward."""
    measured = {}
    for place, (name, of_rounds) in enumerate(seconds.items()):
        measured[place] = {
            number: RunMeasurement.read(
                measured_run(f"{name}{number}", {"forward": 0.9 * step_s, "gradient_sync": 0.1 * step_s}), warm_up=2
            )
            for number, step_s in enumerate(of_rounds, start=1)
        }
    return compare([SeriesPoint(name) for name in seconds], SeriesResults(measured))


def test_a_variant_that_is_twice_as_slow_is_found_in_three_rounds(measured_run: MeasuredRun) -> None:
    """A comparison of medians alone would see 1.0, 1.6, 1.1 against 2.0, 3.2, 2.2 and call the spread too large."""
    seconds = {
        "fast": tuple(busy * noise for busy, noise in zip(BUSY, NOISE["a"], strict=True)),
        "slow": tuple(2 * busy * noise for busy, noise in zip(BUSY, NOISE["b"], strict=True)),
    }
    fast, slow = results(measured_run, seconds)
    assert slow.is_distinguishable and verdict(slow) == "2.02 x as slow"
    assert slow.speed is not None and slow.speed.median == pytest.approx(1 / 2.02, rel=0.01)
    # the ratios are 0.495, 0.515 and 0.495
    noise = "differences below 2.0 % cannot be told from noise here"
    assert conclusion([fast, slow]) == f"nothing is measurably faster than fast; {noise}"


def test_equal_variants_are_not_distinguishable(measured_run: MeasuredRun) -> None:
    equal = results(measured_run, NOISE)[1]
    assert not equal.is_distinguishable and verdict(equal) == "not distinguishable here"
    one_round = results(measured_run, {"c": (1.0,), "d": (3.0,)})[1]
    assert verdict(one_round) == "not known: it takes 3 rounds"


def test_a_faster_variant_is_named_with_what_it_gains(measured_run: MeasuredRun) -> None:
    compared = results(measured_run, {"a": (1.0, 1.01, 1.0), "b": (0.8, 0.8, 0.81), "c": (0.5, 0.5, 0.5)})
    assert conclusion(compared) == "fastest: c, 2 x as fast as a"


def test_a_measurement_is_of_steps_alone(measured_run: MeasuredRun) -> None:
    """The warm-up is ten times slower here, and a save takes five seconds of the first step that counts."""
    run = RunMeasurement.read(
        measured_run("run", {"forward": 0.3, "gradient_sync": 0.1}, peaks_mib=(200.0, 300.0), predicted_s=0.2), 2
    )
    assert run.step_s == pytest.approx(0.4) and run.steps == 8
    assert sum(run.parts_s.values()) == pytest.approx(run.step_s)
    assert run.parts_s["gradient_sync"] == pytest.approx(0.1) and "checkpoint" not in run.parts_s
    assert run.communication_share == pytest.approx(0.25)
    assert run.tokens_per_s == pytest.approx(8 * 32 / 0.4) and run.samples_per_s == pytest.approx(20.0)
    assert run.memory_mib == 300.0, "that of the fullest rank, and not of rank 0"
    assert run.predicted_step_s == 0.2


def test_steps_that_the_warm_up_is_mixed_into_do_not_count(measured_run: MeasuredRun) -> None:
    """Parts of every fourth step are the mean of four: after three steps of warm-up the first such mean has some."""
    folder = measured_run("run", {"forward": 0.3}, steps=12, warm_up=3, changes={"monitor": {"log_interval": 4}})
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in records:
        if record["step"] % 4:
            del record["parts_s"], record["wall_s"]
        elif record["step"] == 4:
            record["parts_s"]["optimizer"] = 100.0
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    run = RunMeasurement.read(folder, 3)
    assert run.step_s == pytest.approx(0.3) and run.parts_s["optimizer"] == 0.0 and run.steps == 12


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("metrics.jsonl", '"step_time_s": ', '"step_time_s": -'),
        ("metrics.jsonl", '"step_time_s": ', '"step_time_s": 0e'),
        ("metrics.jsonl", "{", "["),
        ("receipt.json", '"data_parallel_size": 1', '"data_parallel_size": -1'),
        ("receipt.json", '"data_parallel_size": 1', '"data_parallel_size": 1e17'),
    ],
)
def test_damaged_numbers_are_a_sentence(measured_run: MeasuredRun, name: str, old: str, new: str) -> None:
    file = measured_run("run", {"forward": 0.1}) / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(LaunchError):
        RunMeasurement.read(file.parent, 2)


def test_a_run_that_cannot_be_measured_says_why(measured_run: MeasuredRun, tmp_path: Path) -> None:
    short = measured_run("short", {"forward": 0.1}, steps=1, warm_up=1)
    with pytest.raises(LaunchError, match="has 2 steps, and the first 5 do not count"):
        RunMeasurement.read(short, 5)
    (short / "receipt.json").write_text('{"layout": {"tensor_parallel_size": "2"}}')
    with pytest.raises(LaunchError, match=r"no receipt.json that names its layout"):
        RunMeasurement.read(short, 0)
    (short / "config.yaml").write_text("model: [")
    with pytest.raises(LaunchError, match=r"config\.yaml"):
        RunMeasurement.read(short, 0)


def test_steps_of_an_older_version_have_no_parts(measured_run: MeasuredRun) -> None:
    folder = measured_run("old", {"forward": 0.3})
    lines = (folder / "metrics.jsonl").read_text().replace("parts_s", "unknown")
    (folder / "metrics.jsonl").write_text(lines)
    run = RunMeasurement.read(folder, 2)
    assert run.step_s == pytest.approx(0.3) and run.parts_s == {} and run.communication_share is None


def test_a_variant_that_failed_is_a_row_with_its_reason(measured_run: MeasuredRun) -> None:
    run = RunMeasurement.read(measured_run("a1", {"forward": 1.0}), 2)
    points = [SeriesPoint("works"), SeriesPoint("fails")]
    compared = compare(points, SeriesResults({0: {1: run}, 1: {}}, {1: "no memory (exit code 2)"}))
    rows = bench_table(compared, steps=8).rows
    assert rows[1] is not None and rows[1][0] == "fails" and rows[1][-1] == "no memory (exit code 2)"
    assert compared[1].facts()["failure"] == "no memory (exit code 2)" and "step_s" not in compared[1].facts()
    first_failed = compare(points, SeriesResults({0: {}, 1: {1: run}}, {0: "no memory"}))
    assert verdict(first_failed[1]) == "cannot be compared: the first did not run"
