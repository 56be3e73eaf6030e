"""Metrics sinks are found in their folder: a new one is one file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megalite.config import Config
from megalite.monitor import sinks

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
    return Config.model_validate(tiny | {"monitor": {"plot": False}})


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
    assert [sink.name for sink in opened] == ["JsonLinesSink", "ConsoleSink", "Sink"] and failed == ["broken"]
    for sink in opened:
        sink.on_step(_record(1))
        sink.close()
    assert opened[-1].seen == [1]  # type: ignore[attr-defined]
    assert (config.run_dir / "metrics.jsonl").read_text().count("\n") == 1


def _record(step: int) -> dict[str, Any]:
    numbers = dict.fromkeys(("loss", "grad_norm", "learning_rate", "tokens_per_second", "step_time_s"), 1.0)
    return numbers | {"step": step, "skipped": False, "skipped_steps": 0}


def test_metrics_that_cannot_be_written_end_the_start(config: Config) -> None:
    """A run without metrics.jsonl would train for nothing; it is not one of the sinks that may fail."""
    (config.run_dir / "metrics.jsonl").mkdir()
    with pytest.raises(OSError):
        sinks.open_sinks(config, 0, lambda name: pytest.fail(name))
