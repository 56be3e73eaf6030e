"""The fields of a record, from the observer that measures them to metrics.jsonl, which has every step once."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

from launch.trainer.run_logger import RunLogger
from megalite.monitor.events import EventName
from megalite.monitor.loss_picture import plot_loss
from megalite.monitor.observer import Nonfatal, Observer
from megalite.monitor.records.step import CURVES, StepRecord
from megalite.monitor.sinks.jsonl import JsonLinesSink, stream_records
from tests.helpers.commands import ROOT

FIELDS = """step time loss grad_norm learning_rate loss_scale tokens_seen samples tokens_per_second samples_per_second
step_time_s data_wait_s memory_peak_mib skipped skipped_steps global_batch_size sequence_length evaluation_loss
evaluation_losses evaluation_s self_check_s source_losses source_targets save_blocked_s wall_s parts_s
communication_share experts source_epochs source_tokens session_s goodput model_flops_utilization gpu_utilization
gpu_power_w"""


def test_every_field_has_a_row_in_the_documentation_and_keeps_its_name() -> None:
    """Scripts and dashboards read files by these names; a field without a row has neither meaning nor unit."""
    assert [*StepRecord.__annotations__] == FIELDS.split()
    section = (ROOT / "docs" / "observing.md").read_text().split("## metrics.jsonl\n")[1].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(FIELDS.split())
    drawn = "grad_norm learning_rate loss_scale tokens_per_second step_time_s memory_peak_mib goodput"
    assert [*CURVES] == drawn.split()


def test_every_event_has_a_row_in_the_documentation() -> None:
    section = (ROOT / "docs" / "observing.md").read_text().split("## events.jsonl\n")[1].partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    assert re.findall(r"`([\w ]+)`", " ".join(rows)) == [*get_args(EventName)]


class Thermometer(Observer):
    def __init__(self, divisor: float) -> None:
        self.divisor, self.seen = divisor, list[Any]()

    def measure(self, record: StepRecord) -> StepRecord:
        return cast(StepRecord, {"celsius": 21.0 / self.divisor})

    def on_step(self, record: StepRecord) -> None:
        self.seen.append(record)


def test_what_one_observer_measures_reaches_all_and_changes_no_record() -> None:
    """Owners wrote into one dictionary: what an observer saw hung on its place, and one that failed half-wrote it."""
    said: list[str] = []
    log, observers = cast(Any, RunLogger.__new__(RunLogger)), [*map(Thermometer, (0, 1, 1))]
    log._observers, log._is_rank_zero, log._nonfatal = observers, False, Nonfatal(said.append)
    log.on_step(given := {"step": 1, "loss": 2.0})
    assert given == {"step": 1, "loss": 2.0} and len(said) == 1 and "ZeroDivisionError" in said[0]
    assert [one.seen for one in observers] == [[given | {"celsius": 21.0}]] * 3


def record(step: int) -> StepRecord:
    return {"step": step, "loss": 1.0 / step, "grad_norm": 2.0}


def test_steps_after_the_resume_point_are_dropped_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLinesSink(path, 0)
    for step in range(1, 8):
        first.on_step(record(step))
    path.write_text(path.read_text() + '{"step": 8, "lo')  # killed in the middle of a line
    second = JsonLinesSink(path, 5)
    second.on_step(record(6))
    assert [r["step"] for r in stream_records(path)] == [1, 2, 3, 4, 5, 6]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_late_evaluation_is_added_to_the_record_of_its_step(tmp_path: Path) -> None:
    """Where storage has lost that record, another step's would be taken for it. All sinks are given the whole."""
    path, late, other = tmp_path / "metrics.jsonl", StepRecord(step=3, evaluation_loss=0.5), Thermometer(0)
    first, log = JsonLinesSink(path, 0), cast(Any, RunLogger.__new__(RunLogger))
    log._sinks, log._is_rank_zero, log._nonfatal = [first, other], True, Nonfatal(lambda _: None)
    log._config = SimpleNamespace(run_dir=tmp_path)
    for step in (1, 2):
        first.on_step(record(step))
    log.on_late_evaluation(late)
    assert list(stream_records(path)) == [record(1), record(2)] and not other.seen
    first.before_evaluation(record(3))
    log.on_late_evaluation(late)
    assert list(stream_records(path)) == [record(1), record(2), *other.seen] and other.seen == [record(3) | late]


def test_a_norm_that_is_not_finite_is_null(tmp_path: Path) -> None:
    """JSON has no infinity, and `json.dumps` writes one all the same."""
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", 0)
    sink.on_step({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    assert list(stream_records(tmp_path / "metrics.jsonl")) == [{"step": 1, "loss": None, "grad_norm": None}]


def test_a_run_with_skipped_steps_can_be_drawn(tmp_path: Path) -> None:
    records = [record(1), {"step": 2, "loss": None}, record(3) | {"evaluation_loss": 0.5}]
    plot_loss(cast(Any, records), tmp_path / "loss.png", "run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
