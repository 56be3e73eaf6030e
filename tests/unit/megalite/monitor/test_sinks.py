"""Metrics sinks are found in their folder: a new one is one file."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.config import Config
from megalite.monitor import sinks
from megalite.monitor.sinks import console, steps
from megalite.monitor.steps.breakdown import COLUMN, ROW, StepBreakdown

NEW_SINK = """
from megalite.monitor.observer import Observer

class Sink(Observer):
    seen = []

    def on_step(self, record):
        self.seen.append(record["step"])

def open_sink(config, first_step):
    return Sink()
"""


@pytest.fixture
def config(tmp_path: Path, tiny: dict[str, Any]) -> Config:
    (tmp_path / "run").mkdir()
    return Config.model_validate(tiny | {"monitor": {"plot": False, "report": False}})


def test_a_file_in_the_folder_is_a_sink(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that cannot be opened is reported by its file's name and left out."""
    (tmp_path / "fresh.py").write_text(NEW_SINK)
    (tmp_path / "broken.py").write_text("def open_sink(config, first_step): raise OSError('no room')")
    monkeypatch.setattr(sinks, "__path__", [*sinks.__path__, str(tmp_path)])
    failed = []

    @contextmanager
    def nonfatal(name: str) -> Iterator[None]:
        try:
            yield
        except OSError:
            failed.append(name)

    opened = sinks.open_sinks(config, 0, nonfatal)
    assert [sink.name for sink in opened] == ["metrics.jsonl", "ConsoleSink", "Sink", "steps.jsonl"]
    assert failed == ["broken"]
    for sink in opened:
        sink.on_step(_record(1))
        sink.close()
    assert opened[2].seen == [1]  # type: ignore[attr-defined]
    assert (config.run_dir / "metrics.jsonl").read_text().count("\n") == 1


def _record(step: int) -> dict[str, Any]:
    numbers = dict.fromkeys(("loss", "grad_norm", "learning_rate", "tokens_per_second", "step_time_s"), 1.0)
    return numbers | {"step": step, "skipped": False, "skipped_steps": 0}


def test_metrics_that_cannot_be_written_end_the_start(config: Config) -> None:
    """A run without metrics.jsonl would train for nothing; it is not one of the sinks that may fail."""
    (config.run_dir / "metrics.jsonl").mkdir()
    with pytest.raises(OSError):
        sinks.open_sinks(config, 0, lambda name: pytest.fail(name))


FULL = {"loss": 10.82346, "grad_norm": 0.51234, "learning_rate": 2.984e-4, "tokens_per_second": 1_234_567.0}
FULL |= {"samples_per_second": 602.8, "model_flops_utilization": 0.4123, "memory_peak_mib": 71_234.0}
FULL |= {"step_time_s": 3.4}
NUMBERS = "loss 10.8235 grad 0.512 lr 2.98e-04 1.23 M tokens/s 603 samples/s MFU 41.2% 69.6 GiB"


def test_a_step_is_one_line_of_a_terminal_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Of a large run, with all that may be known; and what is not known is left out."""
    sink = console.ConsoleSink(total_steps=20_000, first_step=0, log_interval=10)
    sink.on_start()
    for step in (1, 9, 10, 110):  # the last one comes too soon, behind a hundred of which all are shown
        sink.on_step(_record(step) | FULL)
    sink.on_step(_record(20_000) | {"skipped": True, "evaluation_loss": 2.0})
    date, full, skipped, evaluated, bare = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d \d{4}-\d\d-\d\d, UTC[+-]\d{4}", date)
    assert re.fullmatch(r"\d\d:\d\d:\d\d .*", full) and full[9:] == f"step 10/20000 {NUMBERS} left 18:52:46"
    assert len(full) <= 125
    assert "skipped" in skipped and "evaluation loss 2.0000" in evaluated
    assert bare[9:] == "step 20000/20000 loss 1.0000 grad 1.00 lr 1.00e+00 1 tokens/s left 0:00"


def test_a_step_without_targets_shows_no_loss_and_the_first_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Its loss of 0.0000 looked like success, step after step."""
    sink = console.ConsoleSink(total_steps=5, first_step=0, log_interval=1)
    for step in (1, 2, 3):
        sink.on_step(_record(step) | {"loss": 0.0 if step > 1 else 2.0, "evaluation_loss": 0.0})
    out = capsys.readouterr().out
    assert "0.0000" not in out and out.count("loss - grad") == 2 and out.count("evaluation loss -") == 3
    assert out.count("warning") == 1 and "warning: step 2 has no loss, because none of its tokens carries one" in out


def test_a_new_day_is_said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1.7e9]
    monkeypatch.setattr(console.time, "localtime", lambda: time.gmtime(now[0]))
    sink = console.ConsoleSink(total_steps=4, first_step=0, log_interval=1)
    for step in (1, 2, 3):
        sink.on_step(_record(step))
        now[0] += 3600 * (step == 1) + 86_400 * (step == 2)
    dates = [line[9:19] for line in capsys.readouterr().out.splitlines() if ", UTC" in line]
    assert dates == ["2023-11-14", "2023-11-15"]


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
def test_on_a_terminal_the_display_stays_one_line(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the numbers goes where there is no room; step and time left do not."""
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": str(columns), "LINES": "40", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    sink = console.ConsoleSink(total_steps=20_000, first_step=0, log_interval=10)
    sink.on_step(_record(10) | FULL)
    sink.close()
    seen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().out)
    last = [line for line in re.split(r"[\r\n]+", seen) if line.strip()][-1]
    assert len(last) <= columns and "10/20000 left 18:52:46" in last
    assert columns < 200 or NUMBERS in last


def _pipelined_step(step: int, busy_s: float) -> StepBreakdown:
    """A step of 10 s on four pipeline stages of two replicas."""
    rows = np.zeros((8, len(ROW)))
    rows[:, COLUMN["steps"]], rows[:, COLUMN["forward"]] = 1, 1.0
    rows[:, COLUMN["began"]], rows[:, COLUMN["ended"]], rows[:, COLUMN["busy_s"]] = 0.0, 10.0, busy_s
    return StepBreakdown.of(step, rows, [0, 0, 1, 1, 2, 2, 3, 3], [0.0] * 8)


@pytest.mark.parametrize(("schedule", "share"), [("1f1b", 3 / 11), ("zero-bubble", 1 / 9)])
def test_at_the_end_the_idle_of_a_pipeline_stands_beside_that_of_its_schedule(
    config: Config, schedule: str, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Closed forms for 4 stages and 8 micro-batches, (p - 1) / (m + p - 1) and a third of the bubble: Qi 2023."""
    values = config.model_dump(mode="json")
    values["parallel"] |= {"pipeline_parallel_size": 4, "pipeline_schedule": schedule, "data_parallel_size": 2}
    values["training"] |= {"global_batch_size": 8 * 2 * config.training.micro_batch_size}
    values["model"] |= {"num_hidden_layers": 4}
    sink = steps.open_sink(Config.model_validate(values), 0)
    sink.on_breakdown(_pipelined_step(1, busy_s=4.0))
    with caplog.at_level("INFO"):
        sink.on_end("ended")
    expected = f"pipeline idle 60% / 60% / 60% / 60% by stage (the schedule's own: {share:.0%})"
    assert expected in caplog.text, caplog.text


def test_the_idle_of_a_pipeline_is_that_of_the_batch_at_the_end(
    config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    """After a change from 8 to 24 micro-batches the idle of both was held against the bubble of the first."""
    values = config.model_dump(mode="json")
    values["parallel"] |= {"pipeline_parallel_size": 4, "data_parallel_size": 2}
    batch = 8 * 2 * config.training.micro_batch_size
    values["training"] |= {"global_batch_size": batch, "stages": [{"from_steps": 1, "global_batch_size": 3 * batch}]}
    values["model"] |= {"num_hidden_layers": 4}
    sink = steps.open_sink(Config.model_validate(values), 0)
    sink.on_breakdown(_pipelined_step(1, busy_s=4.0))
    sink.on_breakdown(_pipelined_step(2, busy_s=8.0))
    with caplog.at_level("INFO"):
        sink.on_end("ended")
    expected = f"pipeline idle 20% / 20% / 20% / 20% by stage (the schedule's own: {3 / 27:.0%})"
    assert expected in caplog.text, caplog.text
