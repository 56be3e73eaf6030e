"""`megalite status`: what is told of a run's folder, in closed form, and that anything in it is survived."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch.errors import LaunchError
from launch.inspection.history import RunHistory
from launch.inspection.listing import list_runs, row_of
from launch.inspection.run_files import check_is_run
from launch.inspection.state import RunState, Traces, infer_state
from launch.inspection.status import as_json, read_status
from launch.inspection.status_output import status_lines
from launch.runtime.run_lock import LOCK, take_lock
from megalite.config import ConfigError, load_config
from megalite.resilience.rank_registry import RankFile
from tests.unit.launch.inspection.conftest import MakeRun


def test_a_run_that_lives_tells_its_progress(make_run: MakeRun) -> None:
    folder = make_run()
    lock = (folder / LOCK).read_text()
    with take_lock(folder):
        (folder / LOCK).write_text(lock)  # of this session
        status = read_status(folder)
    assert status.state is RunState.RUNNING and status.state.is_healthy
    assert (status.step, status.total_steps, status.checkpoint, status.steps_at_risk) == (30, 100, 20, 10)
    assert status.loss == pytest.approx(3.7) and status.tokens_per_second == 142 and status.goodput == 0.5
    assert status.step_s == pytest.approx(1.0), "from step to step, not only the 0.9 s in it"
    assert status.left_s == pytest.approx(70.0)
    assert status.layout == "tp2 pp1 dp1 zero1 fp32" and status.sessions == 1
    lines = list(status_lines(status))
    assert lines[0].startswith(f"{folder}: running: ") and "10 steps would be lost now" in "\n".join(lines)
    assert any("step 30 of 100 (30.0 %), which ended 5 s ago; loss 3.7000" in line for line in lines), lines
    assert any("saved: step 20" in line for line in lines) and not any("before_s" in line for line in lines)
    facts = json.loads(json.dumps(as_json(status, 1), allow_nan=False))
    assert facts["state"] == "running" and facts["is_healthy"] is True and facts["steps_at_risk"] == 10
    assert 4 < facts["last_step_age_s"] < 60 and [event["event"] for event in facts["last_events"]] == ["saved"]


def test_a_step_without_targets_has_no_loss(make_run: MakeRun) -> None:
    """Its loss of 0.0000 looked like success."""
    folder = make_run()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["loss"] = 0.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read_status(folder).loss == lines[-2]["loss"]
    losses = RunHistory.read(folder).column("loss")
    assert losses[-2] == lines[-2]["loss"] and math.isnan(losses[-1])


def test_the_length_is_what_the_session_counted(make_run: MakeRun) -> None:
    """Its config counts all steps of `training.tokens` at the new batch size, also those done at another."""
    folder = make_run(ending="ended")
    assert read_status(folder).total_steps == 100, "of a version that did not note it"
    first, *others = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    started = json.dumps(json.loads(first) | {"total_steps": 30}) + "\n"
    (folder / "events.jsonl").write_text("".join([started, *others]))
    status = read_status(folder)
    assert status.total_steps == 30 and "step 30 of 30 (100.0 %)" in "\n".join(status_lines(status))
    (run,) = list_runs(folder.parent, 1)
    assert row_of(run)["total_steps"] == 30


def test_a_run_whose_last_state_could_not_be_saved_says_why(make_run: MakeRun) -> None:
    folder = make_run()
    with (folder / "events.jsonl").open("a") as file:
        event = {"time": time.time(), "event": "save_failed", "step": 30, "reason": "the disk is full"}
        file.write(json.dumps(event) + "\n")
    status = read_status(folder)
    assert status.state is RunState.FAILED and status.reason == "its state could not be saved: the disk is full"


def test_a_run_that_was_killed_has_failed_and_has_no_time_left(make_run: MakeRun) -> None:
    status = read_status(make_run())
    assert status.state is RunState.FAILED and status.left_s is None
    assert "10 steps have to be done again" in "\n".join(status_lines(status))


def test_checkpoints_that_may_not_be_read_leave_the_rest_of_a_run(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_run(ending="ended")

    def refuse(place: Path) -> None:  # as `is_dir` of what is in a folder without rights; tests may be root
        raise PermissionError(13, "Permission denied", str(place / "checkpoints"))

    monkeypatch.setattr("launch.inspection.status.find_latest", refuse)
    (run,) = list_runs(folder.parent, 1)
    assert (run.status.state, run.status.step, run.status.checkpoint) == (RunState.ENDED, 30, 20)
    lines = "\n".join(status_lines(read_status(folder)))
    assert "step 30 of 100" in lines and f"not read:    {folder}/checkpoints cannot be read: Permission denied" in lines


@pytest.mark.parametrize(
    ("ending", "state"),
    [("ended", RunState.ENDED), ("interrupted", RunState.INTERRUPTED), ("preempted", RunState.PREEMPTED)],
)
def test_how_it_ended_is_its_state_for_ever(make_run: MakeRun, ending: str, state: RunState) -> None:
    status = read_status(make_run(steps=20, age_s=1e6, ending=ending))
    assert status.state is state and status.steps_at_risk == 0
    assert "nothing would be lost" in "\n".join(status_lines(status))


def test_a_new_start_of_an_ended_run_waits_for_its_first_step(make_run: MakeRun) -> None:
    folder = make_run(steps=20, age_s=1e6, ending="ended")
    with take_lock(folder):
        status = read_status(folder)
    assert status.state is RunState.WAITING and status.left_s is None and status.tokens_per_second is None
    assert read_status(folder).state is RunState.WAITING, "this process lives, and was the last to take it"


def test_silence_is_judged_by_the_watchdog_s_limit(make_run: MakeRun) -> None:
    """Steps of a second: 300 s, the least that the watchdog allows; or while a save is written, half an hour."""
    folder = make_run(age_s=400)
    assert state_of_living(folder) is RunState.HUNG
    (folder / "checkpoints" / ".step_00000030.tmp").mkdir()
    assert state_of_living(folder) is RunState.RUNNING


@pytest.mark.parametrize(
    ("what", "steps", "interval", "healthy_s"),
    [
        ("a step without an evaluation", 48, 25, 300),
        ("the first evaluation", 24, 25, 300 + 1800),
        ("a later evaluation", 49, 25, 300 + 4000),  # ten times an earlier one
        ("the step after an evaluation", 50, 25, 400 + 300),  # which its record does not count
        ("the evaluation at the end", 99, 1000, 300 + 1800),
        ("no evaluation at the end", 99, 0, 300),
    ],
)
def test_the_limit_is_that_of_what_comes_next(
    what: str, steps: int, interval: int, healthy_s: float, make_run: MakeRun
) -> None:
    """Or the longest evaluations of healthy runs would look like hangs; a limit that is lost would hide real ones."""
    for age_s, state in ((healthy_s - 30, RunState.RUNNING), (healthy_s + 30, RunState.HUNG)):
        folder = make_run(str(age_s), steps, age_s, saved=None, interval=interval)
        assert state_of_living(folder) is state, (what, age_s)


def test_an_evaluation_of_a_step_that_was_saved_before_is_no_hang(make_run: MakeRun) -> None:
    """Its record is written before the evaluation, and again behind it."""
    folder = make_run(steps=50, age_s=4270, saved=None, interval=25)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    del last["evaluation_s"]
    (folder / "metrics.jsonl").write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    assert state_of_living(folder) is RunState.RUNNING
    found = infer_state(Traces(is_alive=True, since_last_write_s=9, limit_s=99, has_stepped=True, is_evaluating=True))
    assert found[1] == "it evaluates after its last step: its last step, event or save was 9 s ago"


@pytest.mark.parametrize(
    ("ago_s", "action", "state"),
    [(999, "rollback", RunState.RUNNING), (999, "skip", RunState.HUNG), (1001, "rollback", RunState.HUNG)],
)
def test_a_rollback_may_take_as_long_as_a_start(ago_s: float, action: str, state: RunState, make_run: MakeRun) -> None:
    """It loads a checkpoint; the last step, 1000 s ago, says that an earlier rollback is over."""
    folder = make_run(age_s=1000)
    with (folder / "events.jsonl").open("a") as events:
        print(json.dumps({"time": time.time() - ago_s, "event": "intervened", "action": action}), file=events)
        changes = [{"option": "parallel.pipeline_parallel_size", "before": 2, "after": 1}]
        print(json.dumps({"time": time.time() - ago_s, "event": "config_changed", "changes": changes}), file=events)
    told = "\n".join(status_lines(read_status(folder)))
    assert "config_changed: changes parallel.pipeline_parallel_size 2 -> 1" in told
    assert state_of_living(folder) is state


def state_of_living(folder: Path) -> RunState:
    """The state while the process of the last session lives."""
    lock = (folder / LOCK).read_text()
    with take_lock(folder):
        (folder / LOCK).write_text(lock)
        return read_status(folder).state


def test_lines_that_are_no_records_are_left_out_and_counted(make_run: MakeRun) -> None:
    """`{"step": 7, "loss": "abc"}` made a run of 6 steps be at step 7 of 6."""
    folder = make_run(steps=20, ending="ended")
    before = read_status(folder)
    with (folder / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 99, "loss": "abc"}\n[1, 2]\nnull\n{"step": true}\n{"step": 21, "lo')
    after = read_status(folder)
    assert (after.step, after.loss) == (before.step, before.loss) and not before.problems
    assert after.problems == (f"{folder / 'metrics.jsonl'}: 5 lines that are no records",)


def test_a_first_start_is_a_run_before_it_has_written_anything(tmp_path: Path) -> None:
    with take_lock(tmp_path):
        status = read_status(tmp_path)
        assert status.state is RunState.WAITING and status.step is None
        assert len(list(status_lines(status))) == 2
    (tmp_path / LOCK).write_text('{"host": "x", "process": 1, "time": 1.0}')
    assert read_status(tmp_path).state is RunState.NOT_STARTED


def test_a_run_that_crashed_while_it_started_names_the_error(make_run: MakeRun) -> None:
    folder = make_run(steps=0, saved=None)
    left = RankFile(folder, 1)
    left.leave("RuntimeError: CUDA error: out of memory")
    left.close()
    (folder / "supervisor.log").write_text("")
    assert read_status(folder).reason == (
        "its last start ended before its first step: rank 1 ended with RuntimeError: CUDA error: out of memory; see "
        f"the output of the command that started it and {folder}/supervisor.log"
    )
    os.utime(folder / ".ranks" / "rank_0001.txt", (1.0, 1.0))
    assert "rank 1" not in read_status(folder).reason, "an error of an earlier start"
    (folder / ".ranks" / "rank_0001.txt").write_bytes(b"\xff{")
    assert "rank 1" not in read_status(folder).reason


def test_only_the_end_of_long_files_is_read(make_run: MakeRun) -> None:
    folder = make_run(steps=50, ending="ended", saved=None)
    text = (folder / "metrics.jsonl").read_text()
    with (folder / "metrics.jsonl").open("w") as file:
        for _ in range(20_000):
            file.write('{"step": 1, "loss": 9.0, "time": 1.0, "padding": "' + "x" * 1000 + '"}\n')
        file.write(text)
    began = time.process_time()
    assert read_status(folder).step == 50
    assert time.process_time() - began < 5


@pytest.mark.parametrize("name", ["config.yaml", "receipt.json", "metrics.jsonl", "events.jsonl", LOCK])
def test_a_file_that_is_broken_or_missing_leaves_the_others(make_run: MakeRun, name: str) -> None:
    folder = make_run(ending="ended")
    for content in (b"", b"\x00\xff not any of it", b"[]", b"null", b'{"time": "x", "event": "started", "step": []}\n'):
        (folder / name).write_bytes(content)
        status = read_status(folder)
        assert (status.state is RunState.ENDED) == (name != "events.jsonl"), (content, status)
        assert list(status_lines(status)) and json.dumps(as_json(status, 5), default=str)
    (folder / name).unlink()
    assert list(status_lines(read_status(folder)))


def test_damaged_events_are_named_and_the_steps_count(make_run: MakeRun) -> None:
    """It said that no session had begun to train, above the progress of that session."""
    for damage in ("empty", "a folder"):
        folder = make_run(damage, ending="ended")
        (folder / "events.jsonl").unlink()
        (folder / "events.jsonl").mkdir() if damage == "a folder" else (folder / "events.jsonl").touch()
        status = read_status(folder)
        assert status.state is RunState.UNREADABLE and status.step == 30
        assert "how its last session ended is not known" in status.reason
        said = "is a folder" if damage == "a folder" else "has no line that can be read"
        assert f"not read:    {folder}/events.jsonl {said}" in list(status_lines(status))


def test_a_single_lost_step_is_one(make_run: MakeRun) -> None:
    assert any("1 step has to be done again" in line for line in status_lines(read_status(make_run(saved=29))))


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=5), st.lists(st.integers())
)
NAMES = st.sampled_from(
    ["time", "event", "step", "loss", "host", "process", "step_time_s", "tokens_per_second", "total_steps"]
)
LINES = st.lists(st.dictionaries(NAMES, VALUES | st.sampled_from(["started", "ended", "hung"])), max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LINES, LINES)
def test_no_value_in_a_file_is_an_error(tmp_path: Path, records: list[object], events: list[object]) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    status = read_status(tmp_path)
    assert all(line.isprintable() for line in status_lines(status))
    json.dumps(as_json(status, 5))


def test_steps_without_a_record_are_told_before_and_after_the_resume(make_run: MakeRun) -> None:
    """After a power cut `status` said "step 8 of 12 ... checkpoint: step 12: nothing would be lost", and no more."""
    folder = make_run(steps=8, saved=12)
    assert read_status(folder).without_record == [[9, 12]]
    (line,) = [line for line in status_lines(read_status(folder)) if line.startswith("records:")]
    assert "steps 9 to 12 have no record" in line
    with (folder / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"time": time.time(), "event": "started", "step": 12, "without_record": [[9, 12]]}) + "\n"
        )
        file.write(json.dumps({"time": time.time(), "event": "started", "without_record": [[], [9, "x"], 3]}) + "\n")
    assert read_status(folder).without_record == [[9, 12]]


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"garbage\n" * 9], ids=["empty", "zeros", "garbage"])
def test_where_no_event_can_be_read_the_reason_is_the_first_line(make_run: MakeRun, content: bytes) -> None:
    """It "failed", with an exit code of 1 and a sentence about a process; also where the receipt tells of the end."""
    folder = make_run()
    (folder / "events.jsonl").write_bytes(content)
    status = read_status(folder)
    assert status.state is RunState.UNREADABLE and "events.jsonl has no line that can be read" in status.reason
    assert "step 30 of 100" in "\n".join(status_lines(status))
    (folder / "receipt.json").write_text(json.dumps({"outcome": {"finished": True}}))
    assert read_status(folder).state is RunState.ENDED


def test_a_session_that_starts_is_counted_and_a_run_that_failed_says_how_it_goes_on(make_run: MakeRun) -> None:
    folder = make_run()
    assert any("have to be done again; the same command goes on from step 20" in one for one in lines_of(folder))
    with take_lock(folder):
        assert read_status(folder).sessions == 2
        assert not any("the same command" in one for one in lines_of(folder))


def lines_of(folder: Path) -> list[str]:
    return list(status_lines(read_status(folder)))


def test_commands_in_messages_can_be_pasted(tmp_path: Path) -> None:
    """A path with a space is quoted, as a shell needs it."""
    folder = tmp_path / "my runs"
    folder.mkdir()
    with pytest.raises(LaunchError, match=f"`megalite ls '{folder}'` lists the runs below it"):
        check_is_run(folder)
    (folder / "ds.toml").write_text("[a\n")
    with pytest.raises(ConfigError, match=f"`megalite config from '{folder}/ds.toml' -o config.yaml`"):
        load_config(folder / "ds.toml")
