"""`megalite trace`: what is written and told of timelines, and that whatever lies in their folder is survived."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from launch.cli.app import main
from launch.errors import USER_ERROR_CODE
from launch.inspection import step_explanation
from launch.inspection.run_files import RunFiles
from launch.inspection.timelines import format_numbers, read_kept_step
from launch.inspection.trace import write_trace
from megalite.monitor.steps.pipeline_parts import pipeline_parts
from megalite.monitor.steps.timeline import RankTimeline, step_folder, write_timeline
from megalite.planner.cost.step_time import StepTime
from megalite.schedules.simulation import PipelineTimes, simulate_schedule
from megalite.schedules.tables import Schedule
from tests.helpers.simulated_ranks import ranks_of
from tests.helpers.sound_trace import check_sound, read_trace
from tests.unit.launch.inspection.conftest import MakeRun

STEPS = (10, 30)
PREDICTED = {  # of four stages
    "matrix products": 0.020,
    "attention": 0.002,
    "memory-bound": 0.001,
    "launches": 0.001,
    "tensor collectives": 0.0,
    "stage imbalance": 0.0,
    "pipeline bubble": 0.009,
    "between stages": 0.003,
    "replicas": 0.0,
    "optimizer": 0.004,
    "offloading": 0.0,
}


def _timelines(step: int, slow: float = 1.0) -> dict[int, RankTimeline]:
    """Four stages, eight micro-batches of 1 and 2 ms; the third stage is so much slower."""
    times = PipelineTimes([1e-3, 1e-3, slow * 1e-3, 1e-3], [2e-3, 2e-3, slow * 2e-3, 2e-3])
    return ranks_of(simulate_schedule(Schedule.ONE_F_ONE_B, times, 8), step)


@pytest.fixture
def run(make_run: MakeRun) -> Path:
    """A run of four stages that kept two steps."""
    folder = make_run(ending="ended")
    layout = {"tensor_parallel_size": 1, "pipeline_parallel_size": 4, "data_parallel_size": 1, "zero_stage": 1}
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["parallel"]["pipeline_parallel_size"] = 4
    config["model"] |= {"num_hidden_layers": 4, "layer_types": None}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    receipt = {"layout": layout, "prediction": {"parts_s": PREDICTED, "problem": None}}
    (folder / "receipt.json").write_text(json.dumps(receipt))
    for step in STEPS:
        for timeline in _timelines(step, slow=2.5 if step == 30 else 1.0).values():
            write_timeline(folder, timeline)
    return folder


def _megalite(*words: str | Path) -> int:
    """Exit code of a command in this process."""
    with patch.object(sys, "argv", ["megalite", *map(str, words)]), pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_the_newest_step_is_written_into_the_run_folder_again_and_again(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert _megalite("trace", run) == 0
        out, err = capfd.readouterr()
        path = run / "trace_step_00000030.json.gz"
        assert f"wrote {path}: step 30 on 4 ranks, 48 messages" in out and not err
    assert check_sound(read_trace(path)) == 48
    assert json.loads(gzip.decompress(path.read_bytes()))["otherData"]["steps"] == [30]


def test_a_range_of_steps_is_one_trace_with_the_events_between(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    moment = _timelines(10)[0].unix - 0.01
    with (run / "events.jsonl").open("a") as file:
        for time, name in ((moment, "saved"), (moment - 3600, "started")):
            file.write(
                json.dumps({"time": time, "event": name, "note": "token=hunter2abcdef", "lost": float("nan")}) + "\n"
            )
    target = run.parent / "two.json.gz"
    assert _megalite("trace", run, "--steps", "1-50", "-o", target, "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert told["steps"] == [10, 30] and told["arrows"] == 96 and told["problems"] == []
    events = read_trace(target)
    (mark,) = (event for event in events if event["ph"] == "i")
    assert mark["name"] == "saved" and "hunter2abcdef" not in json.dumps(events)


def test_why_names_the_bubble_and_its_remedy(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _megalite("trace", run, "--why", "--step", "10") == 0
    out, err = capfd.readouterr()
    assert "span 33.0 ms = work 73 % + the schedule's own bubble 27 % + stage imbalance 0 % + transfers 0 %" in out
    assert "idle share of the span: 27.3 %; the schedule alone would have 27.3 %" in out
    assert "idle time over working time: 37.5 %; the schedule alone would have 37.5 %" in out
    assert "from the schedule's own bubble, 9.00 ms" in out and "more micro-batches per step" in out
    assert (
        "these stages would take 27.0 ms with parallel.pipeline_schedule zero-bubble, and take 33.0 ms with 1f1b" in out
    )
    assert not err and not list(run.glob("trace*"))


def test_no_schedule_is_recommended_that_the_config_forbids(run: Path) -> None:
    """ZeRO-3 has no gradients of weights of their own; an unreadable config allows nothing."""
    found = step_explanation.explain_step(run, read_kept_step(run, 10)).faster
    assert found is not None and found.name == "zero-bubble"
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["parallel"] |= {"pipeline_parallel_size": 4, "zero_stage": 3}
    for text, problems in ((yaml.safe_dump(config), 0), ("{", 1)):
        (run / "config.yaml").write_text(text)
        assert len(RunFiles.read(run).problems) == problems
        assert step_explanation.explain_step(run, read_kept_step(run, 10)).faster is None


def test_why_names_a_slow_stage_as_imbalance(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _megalite("trace", run, "--why", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["step"] == 30 and found["pipeline"]["slowest_stage"] == 2
    loss = found["largest_loss"]
    assert loss["part"] == "stage imbalance" and loss["seconds"] == pytest.approx(found["pipeline"]["imbalance_s"])
    assert loss["remedy"].startswith("stage 2 takes 1.82 times as long as a mean one; fewer stages, or ")


def test_predicted_and_measured_parts_add_up_to_their_steps(run: Path) -> None:
    """None is counted twice, and none of the planner's parts is left out."""
    found = step_explanation.explain_step(run, read_kept_step(run, 10))
    pairs = {pair.name: pair for pair in found.beside_prediction}
    assert sum(pair.measured_s for pair in pairs.values()) == pytest.approx(found.wall_s, abs=1e-12)
    predicted = sum(pair.predicted_s or 0.0 for pair in pairs.values())
    assert predicted == pytest.approx(StepTime(PREDICTED, (), 0.0, 0.0, None).seconds)
    assert pairs["computing"].predicted_s == pytest.approx(0.024) and pairs["computing"].measured_s == pytest.approx(
        0.024
    )
    assert pairs["waiting for a neighbour"].predicted_s == pytest.approx(0.009)
    assert step_explanation.prediction_table(found).rows[-1][2] == step_explanation.seconds(found.wall_s)  # type: ignore[index]


def test_without_a_prediction_or_with_that_of_another_layout_there_is_none(run: Path) -> None:
    receipt = json.loads((run / "receipt.json").read_text())
    for change, sentence in (
        ({"prediction": None}, "has no predicted step time"),
        ({"prediction": {"problem": "no such accelerator"}}, "has no predicted step time: no such accelerator"),
        ({"layout": {**receipt["layout"], "pipeline_parallel_size": 2}}, "is of another layout than this step"),
        ({"layout": 3}, "is of another layout than this step"),
    ):
        (run / "receipt.json").write_text(json.dumps(receipt | change))
        found = step_explanation.explain_step(run, read_kept_step(run, 10))
        assert any(sentence in problem for problem in found.problems) and found.predicted_s == {}
        assert all(pair.predicted_s is None for pair in found.beside_prediction)
        assert step_explanation.prediction_table(found).rows and step_explanation.advice(found)


def _damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def _swap_times(path: Path) -> None:
    lines = path.read_text().splitlines()
    lines[3] = lines[3].replace('"note", ', '"note", 1')  # a later time
    path.write_text("\n".join(lines) + "\n")


def _no_such_stage(path: Path) -> None:
    path.write_text(path.read_text().replace('"stage":2', '"stage":7', 1))


def _age_of_the_universe(path: Path) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines, '["collective", 1e300, 1e300, "tensor", "all_reduce", 1]']) + "\n")


@pytest.mark.parametrize("damage", [Path.unlink, _damage, _swap_times, _no_such_stage, _age_of_the_universe])
def test_a_rank_without_a_sound_file_is_left_out_and_named(
    run: Path, damage: Callable[[Path], Any], capfd: pytest.CaptureFixture[str]
) -> None:
    path = step_folder(run, 30) / "rank_0002.jsonl"
    damage(path)
    assert _megalite("trace", run) == 0
    out, err = capfd.readouterr()
    assert "on 3 ranks, 16 messages" in out and "there is no timeline of ranks 2 of 4" in err
    assert damage is Path.unlink or str(path) in err
    check_sound(read_trace(run / "trace_step_00000030.json.gz"))
    assert _megalite("trace", run, "--why") == USER_ERROR_CODE
    out, err = capfd.readouterr()
    assert "step 30 has no timelines of all stages of a pipeline" in err and not out, "no number is made up"


def test_only_whole_pipelines_are_taken_apart(run: Path) -> None:
    """A pipeline without one of its stages would show all of its waiting as transfer."""
    whole = pipeline_parts(read_kept_step(run, 30).aligned.timelines)
    for rank, timeline in _timelines(30, slow=2.5).items():
        owner = timeline.owner.model_copy(update={"data_parallel_size": 2, "rank": 2 * rank})
        write_timeline(run, replace(timeline, owner=owner, unix=timeline.unix + 900))
        if timeline.owner.stage < 2:
            other = owner.model_copy(update={"data": 1, "rank": 2 * rank + 1})
            write_timeline(run, replace(timeline, owner=other, unix=timeline.unix + 900))
    found = step_explanation.explain_step(run, read_kept_step(run, 30))
    assert whole is not None and found.pipeline is not None
    assert found.pipeline.parts_s == pytest.approx(whole.parts_s, abs=1e-9)
    assert any("2 ranks of pipelines that lack a stage left out" in each for each in found.problems), found.problems


def test_files_of_a_start_with_another_layout_are_left_out(run: Path) -> None:
    """A run that went on with fewer stages did this step again."""
    times = PipelineTimes([1e-3] * 2, [2e-3] * 2)
    for timeline in ranks_of(simulate_schedule(Schedule.ONE_F_ONE_B, times, 8), 30).values():
        write_timeline(run, replace(timeline, unix=timeline.unix + 900))
    kept = read_kept_step(run, 30)
    assert sorted(kept.aligned.timelines) == [0, 1]
    assert kept.problems == ("step 30: 2 files are of an earlier start with another layout, and left out",)


def test_a_record_that_was_cut_is_told(run: Path) -> None:
    cut = _timelines(30, slow=2.5)[3]
    write_timeline(run, replace(cut, is_cut=True, notes=cut.notes[:-5]))
    found = step_explanation.explain_step(run, read_kept_step(run, 30))
    assert found.pipeline is None and any("ranks 3 did more than is recorded" in each for each in found.problems)
    assert write_trace(run, [30], run / "t.json.gz").problems == found.problems[:1]


MISTAKES: dict[str, tuple[list[str], str]] = {
    "no such folder": (["nowhere"], "nowhere does not exist: give the folder of a run"),
    "not a run": (["."], "is no folder of a run"),
    "a URL": (["s3://b/x"], "give a local folder"),
    "a step that was not kept": (["run", "--step", "11"], "step 11: the nearest are 10 and 30; monitor.timeline.steps"),
    "a step after all": (["run", "--step", "300", "--why"], "step 300: the nearest is 30"),
    "no step of a range": (["run", "--steps", "11-29"], "no timeline of steps 11 to 29: there are those of 10, 30"),
    "no range": (["run", "--steps", "30"], "--steps 30: give the first and the last step, such as 10-100"),
    "a range backwards": (["run", "--steps", "30-10"], "--steps 30-10: give the first and the last step"),
    "step 0": (["run", "--step", "0"], "--step must be greater than or equal to 1, got '0'"),
    "both": (["run", "--step", "10", "--steps", "10-30"], "give one of them"),
    "why of a range": (["run", "--why", "--steps", "10-30"], "leave out --steps 10-30"),
    "why into a file": (["run", "--why", "-o", "x.json.gz"], "leave out --output x.json.gz"),
    "another format": (["run", "-o", "x.html"], "name a file that ends in .json.gz"),
    "a folder": (["run", "-o", "run"], "run is a folder: name a file"),
    "somebody's file": (["run", "-o", "mine.json.gz"], "is there already and is no trace that megalite has written"),
    "a link": (["run", "-o", "link.json.gz"], "is there already and is no trace that megalite has written"),
    "no folder for it": (["run", "-o", "no/x.json.gz"], "there is no folder"),
    "no timelines": (["bare"], "monitor.timeline.steps or monitor.timeline.every name"),
    "nothing readable": (["run", "--step", "20"], "no timeline of step 20 can be read"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_changes_nothing(
    mistake: str, run: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_run("bare")
    monkeypatch.chdir(run.parent)
    Path("mine.json.gz").write_bytes(gzip.compress(b'{"traceEvents": []}'))
    Path("link.json.gz").symlink_to("run/receipt.json")
    if mistake == "nothing readable":
        step_folder(run, 20).mkdir()
        (step_folder(run, 20) / "rank_0000.jsonl").write_text("{")
    before = {path: path.read_bytes() for path in run.parent.rglob("*") if path.is_file()}
    words, sentence = MISTAKES[mistake]
    capfd.readouterr()
    assert _megalite("trace", *words) == 2
    out, err = capfd.readouterr()
    assert sentence in err and err.count("\n") == 1 and not out, err
    assert {path: path.read_bytes() for path in run.parent.rglob("*") if path.is_file()} == before


def test_texts_of_strangers_do_not_reach_the_terminal(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    harm = "owned\x1b]0;x\x07\x9b2J\u202e\n"
    for rank, timeline in _timelines(30, slow=1.2).items():
        owner = timeline.owner.model_copy(update={"host": harm, "boot": f"{harm}{rank}"})
        late = [n._replace(time=n.time + 1.0 * (n.time > 5.02)) for n in timeline.notes]
        write_timeline(run, replace(timeline, owner=owner, notes=late, ended=timeline.ended + 1, meetings={rank: 0.0}))
    assert _megalite("trace", run) == 0 and _megalite("trace", run, "--why") == 0
    said = "".join(capfd.readouterr())
    assert "owned" in said and not any(character in said for character in "\x1b\x07\x9b\u202e"), said


def test_numbers_in_words() -> None:
    assert format_numbers([0, 1, 2, 3, 7, 9, 10]) == "0-3, 7, 9-10"
