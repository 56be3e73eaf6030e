"""metrics.jsonl after an interrupted run: every step once."""

from __future__ import annotations

import json
from pathlib import Path

from megalite.monitor.sinks.jsonl import JsonLinesSink, read_records
from megalite.monitor.sinks.plot import plot_loss


def record(step: int) -> dict[str, float]:
    return {"step": step, "loss": 1.0 / step, "grad_norm": 2.0}


def test_steps_after_the_resume_point_are_dropped_and_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonLinesSink(path, 0)
    for step in range(1, 8):
        first.on_step(record(step))
    first.close()
    path.write_text(path.read_text() + '{"step": 8, "lo')  # killed in the middle of a line
    second = JsonLinesSink(path, 5)
    second.on_step(record(6))
    second.close()
    assert [r["step"] for r in read_records(path)] == [1, 2, 3, 4, 5, 6]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_norm_that_is_not_finite_is_null(tmp_path: Path) -> None:
    """JSON has no infinity, and `json.dumps` writes one all the same."""
    sink = JsonLinesSink(tmp_path / "metrics.jsonl", 0)
    sink.on_step({"step": 1, "loss": float("nan"), "grad_norm": float("inf")})
    sink.close()
    assert read_records(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "grad_norm": None}]


def test_a_run_with_skipped_steps_can_be_drawn(tmp_path: Path) -> None:
    records = [record(1), {"step": 2, "loss": None}, record(3) | {"evaluation_loss": 0.5}]
    plot_loss(records, tmp_path / "loss.png", "run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
