"""Pages of results: a renewed table must not lose what was written by hand below it."""

from __future__ import annotations

from pathlib import Path

from benchmarks import harness


def test_a_renewed_page_keeps_what_was_written_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "results.md"
    table = [*harness.header("what", "s", "MiB"), harness.row(("a step", 1, 2))]
    assert table == ["| what | s | MiB |", "|---|---:|---:|", "| a step | 1 | 2 |"]
    harness.renew_page(path, harness.page("Steps", "benchmarks.steps", "here.", *table))
    path.write_text(path.read_text() + "\nThe machine was quiet.\n")
    harness.renew_page(path, harness.page("Steps", "benchmarks.steps", "there."))
    text = path.read_text()
    assert "there." in text and "a step" not in text and text.endswith("\nThe machine was quiet.\n")
