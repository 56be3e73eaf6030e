"""What a page says of a run, without a browser: sentences and sums that would be wrong and look right."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.inspection import timelines
from launch.inspection.history import RunHistory
from launch.inspection.page.explanation_sections import waterfall_section
from launch.inspection.page.page_data import PageData
from launch.inspection.page.sentences import sentences_of
from launch.inspection.status import read_status
from launch.inspection.step_explanation import largest_loss
from megalite.monitor.steps.timeline import step_folder
from tests.helpers.commands import command_line
from tests.helpers.recorded_runs import KEPT_STEP, write_run

NONE_SLOW = "No rank is slower than the others of its stage."


def findings_of(run_dir: Path) -> PageData:
    return PageData.of(RunHistory.read(run_dir), read_status(run_dir))


def append(path: Path, *lines: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def test_stages_of_a_run_resumed_with_another_layout_are_those_of_the_last_one(tmp_path: Path) -> None:
    """A mean over lines of both would thin out stages that the other layout lacks."""
    write_run(tmp_path / "run", stages=4)
    stages = [{"stage": stage, "mean_s": {"forward": 1.0 + stage}} for stage in range(2)]
    append(tmp_path / "run" / "steps.jsonl", *({"step": step, "steps": 1, "stages": stages} for step in (41, 42)))
    found = findings_of(tmp_path / "run")
    assert {stage: parts["forward"] for stage, parts in found.stages.items()} == {0: 1.0, 1: 2.0}
    assert [line["step"] for line in found.recent_breakdowns] == [41, 42]


@pytest.mark.parametrize(("resumed_at", "is_told"), [(0, True), (50, True), (51, False)])
def test_ranks_are_called_equal_only_where_this_session_has_compared_them(
    tmp_path: Path, resumed_at: int, is_told: bool
) -> None:
    """After 150 steps: a resumed session begins anew, and knows nothing of a rank that was slow before."""
    write_run(tmp_path / "run", steps=200)
    append(tmp_path / "run" / "events.jsonl", {"time": 1.8e9, "event": "started", "step": resumed_at})
    assert (NONE_SLOW in sentences_of(findings_of(tmp_path / "run"))) is is_told


def test_a_pipeline_that_cannot_be_taken_apart_is_not_called_none(tmp_path: Path) -> None:
    write_run(tmp_path / "run", replicas=1)
    (step_folder(tmp_path / "run", KEPT_STEP) / "rank_0001.jsonl").unlink()
    found = findings_of(tmp_path / "run")
    assert "not cut into stages" not in waterfall_section(found).caption
    assert any("has no timelines of all stages of a pipeline" in sentence for sentence in sentences_of(found))


def test_the_step_that_is_explained_is_one_without_an_evaluation(tmp_path: Path) -> None:
    """Steps 10 and 40 are kept, and a third of step 40 was an evaluation: not long enough to stand out as a step."""
    write_run(tmp_path / "run", steps=60)
    earlier, later = step_folder(tmp_path / "run", KEPT_STEP), step_folder(tmp_path / "run", 40)
    shutil.copytree(earlier, later)
    for path in later.glob("rank_*.jsonl"):
        path.write_text(path.read_text().replace(f'"step":{KEPT_STEP}', '"step":40'))
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for evaluation_s, drawn in ((0.0, 40), (0.06, KEPT_STEP)):
        for line in lines:
            beside = dict.fromkeys(("evaluation", "self_check", "checkpoint"), 0.0)
            line["parts_s"] = dict.fromkeys(line["parts_s"], 0.01) | beside
            if line["step"] == 40:
                line["parts_s"]["evaluation"] = evaluation_s
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert (kept := findings_of(tmp_path / "run").kept) is not None and kept.step == drawn
        done = command_line("trace", str(tmp_path / "run"), "--why", "--json")
        assert done.returncode == 0 and json.loads(done.stdout)["step"] == drawn


def test_an_evaluation_is_shared_by_the_steps_between_two_of_them(tmp_path: Path) -> None:
    """Where each kept step had one, most would seem to be gained from it, though it comes once in 100 steps."""
    write_run(tmp_path / "run", replicas=1)
    found = findings_of(tmp_path / "run").explanation
    assert found is not None
    parts_s = dict.fromkeys(found.parts_s, 0.001) | {"evaluation": 0.2, "data": 0.004}
    found = replace(found, pipeline=None, parts_s=parts_s)
    alone = largest_loss(found)
    shared = largest_loss(replace(found, intervals={"evaluation": 100}))
    assert alone is not None and (alone.part, alone.seconds) == ("the evaluation", 0.2)
    assert shared is not None and (shared.part, shared.seconds) == ("waiting for data", 0.004)
    last = largest_loss(replace(found, intervals={"evaluation": 40}))
    assert last is not None and last.part == "the evaluation, which 40 steps share" and last.seconds == 0.005


def test_timelines_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be 96 MB, and a page that is watched reads them while a run trains."""
    write_run(tmp_path / "run")
    read: list[Path] = []
    original = timelines.read_timeline

    def counted(path: Path) -> Any:
        read.append(path)
        return original(path)

    monkeypatch.setattr(timelines, "read_timeline", counted)
    assert findings_of(tmp_path / "run").explanation is not None
    assert len(read) == len(set(read)) == 4


def test_negative_seconds_of_a_damaged_file_do_not_cancel_out(tmp_path: Path) -> None:
    """Their sum could be 0, by which shares are divided."""
    write_run(tmp_path / "run", steps=10)
    append(tmp_path / "run" / "metrics.jsonl", {"step": 11, "parts_s": {"forward": 1.0, "backward": -1.0}})
    assert RunHistory.read(tmp_path / "run").wall_s[-1] == 1.0
