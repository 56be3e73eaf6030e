"""What is said of a start that takes long."""

from __future__ import annotations

import time

import pytest

from launch.runtime import startup_progress
from launch.runtime.logs import configure_logging
from launch.runtime.rank_environment import Rank, waiting_hint
from launch.runtime.startup_progress import StartupProgress


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    configure_logging()
    monkeypatch.setattr(startup_progress, "SILENCE_S", 0.2)
    monkeypatch.setattr(startup_progress, "TICK_S", 0.01)


def test_a_long_part_is_told_again_and_a_short_one_never(capsys: pytest.CaptureFixture[str]) -> None:
    with StartupProgress(Rank(0, 0, 2), time.monotonic()) as progress:
        progress.begin("loading libraries")
        time.sleep(0.05)
        progress.begin("building the model")
        time.sleep(0.5)
        progress.on_step({})
        told = capsys.readouterr().out.splitlines()
        time.sleep(0.3)
    assert len(told) >= 2 and {line.partition(" (")[0] for line in told} == {"megalite: building the model"}
    assert capsys.readouterr().out == "", "the first step is done"


def test_waiting_for_others_is_repeated_sparsely(capsys: pytest.CaptureFixture[str]) -> None:
    with StartupProgress(Rank(0, 0, 8), time.monotonic()) as progress:
        progress.begin_waiting(lambda: "rank 0 waits", every_s=60.0)
        time.sleep(0.7)
        assert capsys.readouterr().out == "megalite: rank 0 waits\n"
        progress.begin("building the model")
        time.sleep(0.3)
    assert capsys.readouterr().out.startswith("megalite: building the model (")


def test_other_ranks_speak_where_it_concerns_their_host(capsys: pytest.CaptureFixture[str]) -> None:
    for local_rank in (0, 1):
        with StartupProgress(Rank(8 + local_rank, local_rank, 16), time.monotonic()) as progress:
            progress.begin("loading libraries")
            time.sleep(0.3)
            progress.begin_waiting(lambda: "waits for rank 0", every_s=60.0, on_each_host=True)
            time.sleep(0.3)
    assert capsys.readouterr().out == "megalite: waits for rank 0\n"


def test_the_environment_is_blamed_only_where_no_launcher_is_known() -> None:
    assert "unset them to train on this machine alone" in waiting_hint(Rank(0, 0, 8))
    assert waiting_hint(Rank(0, 0, 8, "torchrun", False)) == ""
    assert waiting_hint(Rank(0, 0, 8, "Slurm", True)) == " (started by Slurm)"
