"""A run on a terminal: bars that are their shares, and an end where the run ends."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.inspection.history import RunHistory
from launch.inspection.state import RunState
from launch.inspection.status import read_status
from launch.inspection.watching import terminal
from launch.inspection.watching.terminal import bar, follow, is_over, plain_line, screen, shares, sparkline
from launch.output import Cell
from launch.runtime.run_lock import LOCK, take_lock
from megalite.monitor.steps.parts import PARTS
from tests.unit.launch.inspection.conftest import MakeRun


def text_of(lines: list[list[Cell]]) -> list[str]:
    return ["".join(cell if isinstance(cell, str) else cell.text for cell in line) for line in lines]


def record_stages(folder: Path, *stages: dict[str, Any]) -> None:
    (folder / "steps.jsonl").write_text(json.dumps({"step": 30, "wall_s": 1.0, "stages": list(stages)}) + "\n")


def test_the_screen_shows_stages_as_bars(make_run: MakeRun) -> None:
    folder = make_run(ending="ended")
    half = {"forward": 0.5, "backward": 0.5}
    record_stages(
        folder,
        {"stage": 0, "mean_s": half, "idle_ratio": 0.125},
        {"stage": 1, "mean_s": {"forward": 0.25, "pipeline_wait": 0.75}, "idle_ratio": None},
    )
    lines = text_of(screen(read_status(folder), RunHistory.read(folder), width=91))
    assert lines[0].startswith(f"{folder}: ended: ")
    (first,), (second,) = ([line for line in lines if line.startswith(f"stage {stage}")] for stage in (0, 1))
    assert first == f"{'stage 0':<11}{'█' * 50}  idle 12.5 %"
    assert second == f"{'stage 1':<11}{'█' * 12}{'░' * 38}"
    assert any("forward 50.0 %" in line and "waiting for a neighbour 75.0 %" in line for line in lines)
    assert any(line.startswith("loss ") and line.endswith("3.99 -> 3.7") for line in lines)
    assert max(map(len, lines[1:])) <= 91, "lines are cut where the terminal ends"


@given(st.dictionaries(st.sampled_from(list(PARTS)), st.floats(0, 1e6), max_size=17), st.integers(1, 200))
def test_a_bar_is_as_long_as_its_room(parts: dict[str, float], width: int) -> None:
    drawn = "".join(text_of([bar(parts, width)]))
    assert len(drawn) == (width if sum(shares(parts).values()) else 0)


def test_a_sparkline_spans_its_heights() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0] * 3, 20) == "▁▁▁"
    assert sparkline([0] * 500 + [1] * 500, 10) == "▁▁▁▁▁█████"


def test_slow_ranks_and_what_strangers_wrote(make_run: MakeRun) -> None:
    folder = make_run()
    slow = {"event": "slow_rank", "rank": 3, "sentence": "rank 3 works at 60% of\x1b[2J the speed"}
    over = {"event": "slow_rank_over", "rank": 3}
    events = folder / "events.jsonl"
    record_stages(folder, {"stage": "\x1b[2J", "mean_s": {"forward": "much", "\x1b": 1}}, {"stage": 1}, {"mean_s": 3})
    with events.open("a") as file:
        file.write(json.dumps({"time": time.time()} | slow) + "\n")
    lines = text_of(screen(read_status(folder), RunHistory.read(folder), 100))
    assert any(line.startswith("slow ") and "rank 3 works at 60%" in line for line in lines)
    assert "rank 3 is slow" in plain_line(read_status(folder), RunHistory.read(folder))
    assert not any("\x1b" in line for line in lines)
    with events.open("a") as file:
        file.write(json.dumps({"time": time.time()} | over) + "\n")
    assert not any(
        line.startswith("slow ") for line in text_of(screen(read_status(folder), RunHistory.read(folder), 99))
    )


def test_it_follows_a_run_to_its_end(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is over nothing more comes: `megalite watch --terminal && notify` has to end."""
    folder = make_run(steps=3)
    lock, waits = (folder / LOCK).read_text(), []
    held = take_lock(folder)
    (folder / LOCK).write_text(lock)

    def one_more_step(seconds: float) -> None:
        waits.append(seconds)
        step = 3 + len(waits)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), "loss": 1.0}) + "\n")
        if step == 6:
            with (folder / "events.jsonl").open("a") as file:
                file.write(json.dumps({"time": time.time(), "event": "ended"}) + "\n")
            held.close()

    monkeypatch.setattr(terminal.time, "sleep", one_more_step)
    seen = [(status.step, status.state, len(history.steps)) for status, history in follow(folder)]
    assert [step for step, _, _ in seen] == [3, 4, 5, 6] and [steps for _, _, steps in seen] == [3, 4, 5, 6]
    assert [state for _, state, _ in seen] == [RunState.RUNNING] * 3 + [RunState.ENDED]
    assert waits == [terminal.INTERVAL_S] * 3


def test_only_a_run_that_can_go_on_is_waited_for() -> None:
    assert not any(map(is_over, (RunState.RUNNING, RunState.WAITING, RunState.HUNG)))
    assert all(map(is_over, (RunState.ENDED, RunState.FAILED, RunState.PREEMPTED, RunState.NOT_STARTED)))
