"""A series of runs whose command is a stand-in that leaves a finished run's folder, fails, or is interrupted."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.experiments import series_runs as running
from launch.experiments.comparison import compare
from launch.experiments.series import RunSeries, SeriesPoint
from launch.experiments.series_runs import SeriesResults, run_series
from launch.trainer.start.checks import CheckedRun
from tests.conftest import write_config
from tests.unit.launch.experiments.conftest import MeasuredRun

# argv: template, log of calls, `train`, config, overrides; the point is told by its micro-batch size
STAND_IN = """
import json, os, shutil, signal, sys, time
template, calls, _, config, *overrides = sys.argv[1:]
options = dict(one.split("=", 1) for one in overrides)
run_dir = json.loads(options["run_dir"])
open(calls, "a").write(run_dir + "\\n")
if options["training.micro_batch_size"] == "4":
    print("megalite: error: it does not fit")
    print("megalite: error: and more")
    sys.exit(2)
if os.path.exists(calls + ".interrupt"):
    os.remove(calls + ".interrupt")
    os.makedirs(run_dir)
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)
shutil.copytree(template, run_dir)
"""


class StandIn:
    """The command that runs a point, and the folders that it was called with."""

    def __init__(self, folder: Path, template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._calls = folder / "calls"
        command = [sys.executable, "-c", STAND_IN, str(template), str(self._calls)]
        monkeypatch.setattr(running, "python_command", lambda module, *words: [*command, *words])

    def interrupt_next(self) -> None:
        self._calls.with_name("calls.interrupt").touch()

    def take_calls(self, series: RunSeries) -> list[str]:
        found = self._calls.read_text().split("\n")[:-1] if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return [str(Path(one).relative_to(series.folder)) for one in found]


@pytest.fixture
def stand_in(measured_run: MeasuredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    return StandIn(tmp_path, measured_run("template", {"forward": 0.5}), monkeypatch)


@pytest.fixture
def series(tiny: dict[str, Any], tmp_path: Path) -> RunSeries:
    config = write_config(tmp_path / "c.yaml", tiny)
    points = [
        SeriesPoint(f"micro_batch_size={size}", (f"training.micro_batch_size={size}",)) for size in ("1", "2", "4")
    ]
    return RunSeries("bench", tmp_path / "series", config, (), tuple(points), steps=8, warm_up=2, rounds=2)


def made(series: RunSeries) -> SeriesResults:
    return run_series(series, lambda run, step: None, lambda run, found: None)


FIRST, SECOND, THIRD = (f"{place:02}_micro-batch-size-{1 << place - 1}" for place in (1, 2, 3))


def test_points_take_turns_and_one_that_fails_is_not_run_again(series: RunSeries, stand_in: StandIn) -> None:
    results = made(series)
    assert stand_in.take_calls(series) == [
        f"{FIRST}/round_1",
        f"{SECOND}/round_1",
        f"{THIRD}/round_1",
        f"{SECOND}/round_2",
        f"{FIRST}/round_2",
    ]
    assert {place: sorted(rounds) for place, rounds in results.measured.items()} == {0: [1, 2], 1: [1, 2], 2: []}
    assert results.failures[2].startswith("it does not fit (exit code 2; its output is in ")
    assert [len(one.runs) for one in compare(series.points, results)] == [2, 2, 0]


def test_a_second_call_runs_what_is_missing_alone(series: RunSeries, stand_in: StandIn) -> None:
    """What an interrupted run has left is removed, and a finished run is not made again, also for more rounds."""
    stand_in.interrupt_next()
    stopped = made(replace(series, points=series.points[:2]))
    assert stopped.stopped_by == signal.SIGINT and not any(stopped.measured.values())
    assert stand_in.take_calls(series) == [f"{FIRST}/round_1"]
    two = replace(series, points=series.points[:2])
    assert made(two).stopped_by is None
    assert len(stand_in.take_calls(series)) == 4
    made(two)
    assert stand_in.take_calls(series) == []
    made(replace(two, rounds=3))
    assert stand_in.take_calls(series) == [f"{FIRST}/round_3", f"{SECOND}/round_3"]


def test_ctrl_c_keeps_what_was_measured(series: RunSeries, stand_in: StandIn) -> None:
    one = replace(series, points=series.points[:2], rounds=1)
    made(replace(one, points=series.points[:1]))
    stand_in.interrupt_next()
    results = made(one)
    assert results.stopped_by == signal.SIGINT
    rows = compare(one.points, results)
    assert len(rows[0].runs) == 1 and rows[0].facts()["tokens_per_s"]["median"] > 0 and not rows[1].runs


def test_a_folder_of_another_series_is_refused(series: RunSeries) -> None:
    checked = series.check()
    series.open(checked)
    series.open(checked)  # the same again
    replace(series, rounds=5).refuse_other_series(checked)
    other: list[tuple[RunSeries, str]] = [
        (replace(series, steps=9), "steps"),
        (replace(series, kind="scaling --weak"), "command"),
        (replace(series, points=series.points[:2]), "points"),
    ]
    for another, name in other:
        with pytest.raises(LaunchError, match=rf"belongs to another series, which differs in its [\w, ]*{name}"):
            another.refuse_other_series(checked[: len(another.points)])
    changed = replace(series, overrides=("training.seed=1",))
    with pytest.raises(LaunchError, match="differs in its configs: name another folder with -o"):
        changed.refuse_other_series(changed.check())


def test_a_folder_with_something_else_in_it_is_left_alone(series: RunSeries, tmp_path: Path) -> None:
    checked: list[CheckedRun] = []
    (tmp_path / "series").mkdir()
    (tmp_path / "series" / "thesis.tex").touch()
    with pytest.raises(LaunchError, match="is not empty and no folder of a series"):
        series.open(checked)
    (tmp_path / "series" / "series.json").write_text("[" * 100_000)
    with pytest.raises(LaunchError, match=r"series\.json cannot be read"):
        series.open(checked)
    with pytest.raises(LaunchError, match="is a file"):
        replace(series, folder=tmp_path / "c.yaml").open(checked)


def test_every_point_is_checked_before_anything_starts(series: RunSeries, stand_in: StandIn) -> None:
    """Each mistake is one sentence, however many points have it, and names what was perhaps meant."""
    wrong = replace(
        series,
        points=(
            SeriesPoint("a", ("training.micro_batch_size=3",)),
            SeriesPoint("b", ("training.micro_batch_sise=2",)),
            SeriesPoint("c", ("training.micro_batch_sise=2",)),
        ),
    )
    with pytest.raises(LaunchError) as caught:
        wrong.check()
    first, second = caught.value.sentences
    assert first.startswith('override "training.micro_batch_size=3": training.global_batch_size 4 is not a multiple')
    assert second.endswith('did you mean "training.micro_batch_size"?')
    assert not series.folder.exists()


def test_runs_make_steps_and_nothing_else(tiny: dict[str, Any], series: RunSeries) -> None:
    """Evaluations and checkpoints are off, unless an override of the user comes after what turns them off."""
    tiny["training"]["evaluation"] = {"interval": 2, "samples": 4}
    tiny["checkpoint"] = {"interval": 2, "keep_best": 1}
    write_config(series.config_path, tiny)
    quiet = series.check()[0].config
    assert quiet.training.evaluation.interval == 0 and quiet.checkpoint.interval == 0 and not quiet.checkpoint.save_last
    assert quiet.total_steps == series.warm_up + series.steps == 10
    asked = replace(series, overrides=("training.evaluation.interval=5",)).check()[0].config
    assert asked.training.evaluation.interval == 5
    assert json.loads(json.dumps(series.definition(series.check()))) == series.definition(series.check())
