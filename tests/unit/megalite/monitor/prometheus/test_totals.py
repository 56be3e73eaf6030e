"""Counts of a run over sessions: they never fall, and say what was lost."""

from __future__ import annotations

import math
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from megalite.monitor.events import EVENTS, EventLog
from megalite.monitor.goodput import Goodput
from megalite.monitor.prometheus.families import COUNTED
from megalite.monitor.prometheus.totals import SHOWN, RunTotals, keep_shown
from megalite.monitor.sinks.jsonl import JsonLinesSink
from megalite.monitor.sinks.steps import STEPS

TOKENS, SAMPLES = 4096, 32
LINE = {
    "steps": 2,
    "stages": [
        {
            "stage": 0,
            "mean_s": {"forward": 0.25, "gradient_sync": 0.5},
            "idle_ratio": 0.125,
            "communication": [{"axis": "data", "operation": "all_reduce", "calls": 3, "bytes": 1024, "seconds": 0.25}],
        }
    ],
}


def record(step: int, **other: Any) -> dict[str, Any]:
    known = {"loss": 3.0, "grad_norm": 0.5, "learning_rate": 1e-3, "skipped": False, "save_blocked_s": 0.25}
    sizes = {"samples": [SAMPLES * (step - 1), SAMPLES * step], "tokens_per_second": TOKENS / 0.3, "step_time_s": 0.3}
    return {"step": step, "time": time.time(), **known, **sizes, **other}


class Sessions:
    """The starts of one run: as a rank 0 that writes its files, and is killed after any step."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir

    def start(self, resumed_step: int) -> RunTotals:
        write = EventLog(self.run_dir / EVENTS).write
        self.goodput = Goodput(self.run_dir, resumed_step, write)
        self.totals = RunTotals.of_run(self.run_dir, resumed_step, TOKENS, SAMPLES)
        self.metrics = JsonLinesSink(self.run_dir / "metrics.jsonl", resumed_step)
        self.steps = JsonLinesSink(self.run_dir / STEPS, resumed_step)
        return self.totals

    def train(self, first: int, last: int, **other: Any) -> None:
        for step in range(first, last + 1):
            self.totals.add_line({"step": step, **LINE})
            self.steps.on_step({"step": step, **LINE})
            one = record(step, **other)
            one |= self.goodput.measure(one)
            self.totals.add_record(one)
            self.metrics.on_step(one)

    def show(self) -> dict[tuple[str, ...], float]:
        """What a scrape shows and keeps; it must not be less than what was shown before."""
        values = self.totals.values()
        keep_shown(self.run_dir / SHOWN, values)
        return flat(values)


def flat(values: Any) -> dict[tuple[str, ...], float]:
    return {(name, *key): value for name, series in values.items() if name in COUNTED for key, value in series.items()}


@pytest.mark.parametrize("is_scraped_often", [True, False])
def test_no_count_falls_over_kills_and_rollbacks(tmp_path: Path, is_scraped_often: bool) -> None:
    """Skipped steps that are lost, in a session before the last one, are in no file but that of what was shown."""
    sessions, shown = Sessions(tmp_path), [{}]
    sessions.start(0)
    shown.append(sessions.show())
    sessions.train(1, 6)
    sessions.train(7, 9, skipped=True)
    shown.append(sessions.show())
    for resumed in (5, 5, 6):
        sessions.start(resumed)
        for last in (resumed, 7):
            sessions.train(resumed + 1, last)
            if is_scraped_often:
                shown.append(sessions.show())
    sessions.train(4, 5)  # a rollback
    shown.append(sessions.show())
    for before, after in pairwise(shown):
        assert all(after[key] >= value for key, value in before.items()), "Prometheus would see a reset"
    made = 9 + 2 + 2 + 1 + 2
    totals = {outcome: shown[-1]["megalite_steps_total", outcome] for outcome in ("taken", "skipped", "lost")}
    assert totals["skipped"] == 3 and totals["taken"] + totals["skipped"] == made
    assert totals["lost"] == (9 - 5) + (7 - 5) + (7 - 6) + (7 - 4 + 1)
    assert shown[-1]["megalite_tokens_total",] == made * TOKENS
    assert shown[-1]["megalite_samples_total",] == made * SAMPLES


def test_steps_behind_what_was_shown_last_are_counted_once(tmp_path: Path) -> None:
    """A step that no file holds any more, when one before it is lost but still on record; and a rollback just shown."""
    sessions = Sessions(tmp_path)
    sessions.start(0)
    sessions.train(1, 3)
    sessions.show()
    sessions.train(4, 4)  # which the next start drops, unseen
    sessions.start(3)
    values = flat(sessions.start(2).values())
    assert values["megalite_steps_total", "taken"] == 4 and values["megalite_steps_total", "lost"] == 2
    sessions.train(1, 1)  # a rollback; its event is later than the record
    sessions.show()
    values = flat(sessions.start(1).values())
    assert values["megalite_steps_total", "taken"] == 5 and values["megalite_tokens_total",] == 5 * TOKENS
    for step, is_shown in ((2, True), (3, False)):  # the end of a session, which its event tells of
        blocked_s = values["megalite_checkpoint_blocked_seconds_total",]
        sessions.train(step, step, save_blocked_s=0.25)
        sessions.show()
        sessions.goodput.on_end("ended", save_blocked_s=2.0)
        sessions.totals.add_end(2.0)
        if is_shown:
            sessions.show()
        values = flat(sessions.start(step).values())
        assert values["megalite_checkpoint_blocked_seconds_total",] == blocked_s + 2.25


def test_a_run_that_was_not_watched_before_is_counted_from_its_files(tmp_path: Path) -> None:
    """The exporter is switched on in the second session: what the first one lost is in no record."""
    sessions = Sessions(tmp_path)
    sessions.start(0)
    sessions.train(1, 9)
    sessions.start(5)
    sessions.train(6, 6)
    values = flat(sessions.start(6).values())
    assert values["megalite_steps_total", "taken"] == 10 and values["megalite_steps_total", "lost"] == 4
    assert values["megalite_tokens_total",] == 10 * TOKENS
    assert values["megalite_step_part_seconds_total", "0", "forward"] == pytest.approx(6 * 0.5)
    assert values["megalite_communication_bytes_total", "0", "data", "all_reduce"] == 6 * 2048


def test_events_before_are_counted(tmp_path: Path) -> None:
    events = EventLog(tmp_path / EVENTS)
    events.write("saved", step=1)
    events.write("save_failed", step=2)
    events.write("intervened", action="skip")
    events.write("intervened", action="no action of ours")
    events.write("ended", save_blocked_s=2.0)
    values = RunTotals.of_run(tmp_path, 0, TOKENS, SAMPLES).values()
    assert values["megalite_checkpoint_saves_total"] == {("saved",): 1, ("failed",): 1}
    assert values["megalite_interventions_total"] == {("skip",): 1, ("rollback",): 0, ("stop",): 0}
    assert values["megalite_checkpoint_blocked_seconds_total"] == {(): 2.0}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"megalite_tokens_total": [[[], 1e30]]}', '{"x": [[["a"], 1.0]]}'])
def test_what_is_no_file_of_ours_is_not_believed(tmp_path: Path, text: str) -> None:
    (tmp_path / SHOWN).write_text(text)
    (tmp_path / STEPS).write_text('{"step": 1, "steps": "x", "stages": [3]}\n{"step": 2, "stages": {}}\n')
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "step_time_s": "x", "samples": 3, "tokens_per_second": null}\n'
    )
    values = RunTotals.of_run(tmp_path, 0, TOKENS, SAMPLES).values()
    assert values["megalite_tokens_total"] == {(): 0.0} and "x" not in values


def test_a_norm_that_is_not_finite_is_no_number() -> None:
    totals = RunTotals()
    totals.add_record(record(1, grad_norm=None, loss=math.nan))
    values = totals.values()
    assert math.isnan(values["megalite_gradient_norm"][()]) and math.isnan(values["megalite_loss_nats"][()])


def test_an_interval_between_saves_is_the_usual_one() -> None:
    """One long pause between sessions must not hide a missing checkpoint."""
    totals = RunTotals()
    for when in (100.0, 160.0, 220.0, 9000.0, 9060.0):
        totals.add_save(when, is_complete=True)
    totals.add_save(9999.0, is_complete=False)
    values = totals.values()
    assert values["megalite_checkpoint_interval_seconds"] == {(): 60.0}
    assert values["megalite_checkpoint_last_timestamp_seconds"] == {(): 9060.0}
