"""Mistakes at `megalite bench` and `megalite scaling`: one sentence, exit code 2, nothing written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from launch.cli.app import main
from tests.conftest import write_config
from tests.unit.launch.experiments.conftest import write_measured_run

MISTAKES = {
    "bench --vary parallel.zero_stag=1,2": 'unknown option "parallel.zero_stag": did you mean "parallel.zero_stage"?',
    "bench --vary zero_stage=1,2": 'unknown option "zero_stage": did you mean "parallel.zero_stage"?',
    "bench --vary parallel.zero_stage=1,9": "parallel.zero_stage must be 0, 1, 2, 3 or auto, got 9",
    "bench --vary training.micro_batch_size=2,3": "training.global_batch_size 4 is not a multiple of",
    "bench --vary parallel.zero_stage": "write an option and its values",
    "bench training.steps=9": "--steps is the number of steps that are measured: leave this one out",
    "bench --steps 0": "--steps must be greater than or equal to 1, got '0'",
    "scaling": "either --weak or --strong",
    "scaling --ranks 1,2": "either --weak or --strong",
    "scaling --ranks 1,2 --weak --strong": "either --weak or --strong",
    "scaling --ranks a,b --weak": "write numbers of ranks",
    "scaling --ranks 3 --strong": "training.global_batch_size 4 is not a multiple of",
    "scaling --ranks 1,1000 --weak": "cores, and ranks that share one show nothing about scaling",
    "scaling --ranks 1 --weak --grow tensor": "--grow tensor adds no replica",
    "scaling --from": "-o FOLDER",
    "scaling --from --weak -o x": "none of --ranks, --weak, --strong and --dry-run",
}


@pytest.fixture
def megalite(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command in this process; returns its exit code."""

    def call(*words: str | Path) -> int:
        monkeypatch.setattr(sys, "argv", ["megalite", *map(str, words)])
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")
        with pytest.raises(SystemExit) as caught:
            main()
        assert isinstance(caught.value.code, int)
        return caught.value.code

    return call


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_sentence(
    words: str, megalite: Any, tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = words.split()
    config = write_config(tmp_path / "c.yaml", tiny)
    assert megalite(command, config, *options) == 2
    said = capsys.readouterr().err
    assert MISTAKES[words] in said and len(said.strip().splitlines()) == 1, said
    assert not list(tmp_path.glob("run*")), "nothing may be written"


def test_a_dry_run_lists_the_points_and_writes_nothing(
    megalite: Any, tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path / "c.yaml", tiny)
    assert megalite("bench", config, "--vary", "training.micro_batch_size=1,2", "--dry-run") == 0
    assert "dry run: 6 runs of 25 steps each" in capsys.readouterr().out
    assert megalite("scaling", config, "--ranks", "1,2", "--strong", "--dry-run") == 0
    assert "parallel.data_parallel_size=2" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_runs_of_two_networks_show_which_part_the_slower_one_costs(
    megalite: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a user compares clusters: a report on each, from the same run on one rank."""
    one = write_measured_run(tmp_path / "one", {"forward": 0.8})
    for name, sync_s, lost in (("fast", 0.1, 20), ("slow", 0.2, 33)):
        two = write_measured_run(tmp_path / name, {"forward": 0.4, "gradient_sync": sync_s}, data_parallel_size=2)
        assert megalite("scaling", "--from", two, one, "--warm-up", "2", "-o", tmp_path / f"{name}_report") == 0
        assert f"of {lost} points lost, {lost} to gradient synchronisation" in capsys.readouterr().out
        assert (tmp_path / f"{name}_report" / "scaling.html").stat().st_size > 10_000
