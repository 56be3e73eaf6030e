"""Profiles of a run on ranks: of the right steps, for HTA's eyes, and without any effect on the run."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

from tests.helpers.engine_cases import Case
from tests.helpers.rank_pool import run_ranks
from tests.helpers.recorded_run import KeptLog, config_of, train_case


class _Asking(KeptLog):
    """Asks for a profile after the third step."""

    def __init__(self, request: Path) -> None:
        super().__init__()
        self._request = request

    def on_step(self, record: dict[str, Any]) -> None:
        super().on_step(record)
        if record["step"] == 3:
            self._request.touch()


def _losses(rank: int, folder: Path) -> list[list[float]]:
    """Of runs with profiles, without any, and with hostile things where they would be."""
    case, losses = Case(dp=2, steps=5), []
    for name in ("profiled", "bare", "hostile"):
        run_dir, options = folder / name, {"steps": [2]} if name != "bare" else {}
        run_dir.mkdir(exist_ok=True)
        log = _Asking(run_dir / "profile_next") if name == "profiled" and rank == 0 else KeptLog()
        if name == "hostile" and rank == 0:
            (run_dir / "profile").symlink_to(folder / "elsewhere")
            os.mkfifo(run_dir / "profile_next")
        train_case(case, config_of(case, run_dir, {"profile": options}), log)
        losses.append(log.losses)
    return losses


def test_profiles_are_of_the_asked_steps_and_change_no_loss(tmp_path: Path) -> None:
    """One step is named in the config, another one asked for by a file that rank 0 sees while the run goes on."""
    somebodys = tmp_path / "elsewhere/step_2/rank_0.json.gz"
    somebodys.parent.mkdir(parents=True)
    somebodys.touch()
    for profiled, bare, hostile in run_ranks(_losses, 2, tmp_path):
        assert len(bare) == 5 and profiled == bare == hostile
    found = tmp_path / "profiled/profile"
    assert sorted(path.name for path in found.iterdir()) == ["step_2", "step_4"]
    for step in (2, 4):
        files = {path.name: path for path in (found / f"step_{step}").iterdir()}
        assert sorted(files) == ["rank_0.json.gz", "rank_0.txt", "rank_1.json.gz", "rank_1.txt"]
        for rank in (0, 1):
            with gzip.open(files[f"rank_{rank}.json.gz"]) as file:
                trace = json.load(file)
            assert trace["distributedInfo"]["rank"] == rank
            names = [event.get("name", "") for event in trace["traceEvents"]]
            assert [name for name in names if name.startswith("ProfilerStep#")] == [f"ProfilerStep#{step}"]
            assert "aten::mm" in names and any("backward" in name.lower() for name in names)
            assert "aten::mm" in files[f"rank_{rank}.txt"].read_text()
    assert not (tmp_path / "profiled/profile_next").exists(), "a request is for one step"
    assert list(somebodys.parent.parent.rglob("*.*")) == [somebodys], "no link is followed"
    assert not (tmp_path / "bare/profile").exists()
