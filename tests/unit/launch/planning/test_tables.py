"""Tables of all plan commands: whole at any width, in terminals and in pipes; what people wrote is never markup."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from launch import output
from launch.cli.plan import plan_app
from tests.conftest import write_config
from tests.unit.launch.planning.test_calibration import finished, receipt_of, write

Words = Callable[[Path, dict[str, Any]], list[str]]


def _calibrate(tmp_path: Path, _: dict[str, Any]) -> list[str]:
    run = finished(tmp_path / "a_run_with_a_long_name", None, tensor_parallel_size=4, data_parallel_size=2)
    return ["calibrate", str(run), "--dry-run"]


def _layouts(tmp_path: Path, tiny: dict[str, Any]) -> list[str]:
    config = write_config(tmp_path / "tiny.yaml", tiny)
    return ["layouts", str(config), "--gpus", "4", "--accelerator", "H100"]


COMMANDS: dict[str, Words] = {
    "calibrate": _calibrate,
    "layouts": _layouts,
    "reliability": lambda *_: ["reliability", "--gpus", "8,...,16384"],
    "tutorial": lambda *_: ["reliability", "--preset", "tutorial"],
    "simulate": lambda *_: ["simulate", "--gpus", "16384", "--days", "30", "--seeds", "2"],
    "schedule": lambda *_: ["schedule", "--schedule", "all"],
}


def plan(*words: str) -> str:
    """What is printed; what is raised goes to the caller."""
    done = CliRunner().invoke(plan_app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_cell_is_whole(
    command: str, width: int, tmp_path: Path, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: width)
    told = plan(*COMMANDS[command](tmp_path, tiny))
    lines = [line for line in told.splitlines() if line.startswith(tuple("│┃┏┡├└"))]
    assert lines and "…" not in told and max(map(len, lines)) <= width
    for rule in (line for line in lines if line[0] == "┏"):
        assert all(len(column) >= 2 for column in rule.strip("┏┓").split("┳")), rule
    for row in (line for line in lines if line[0] == "│"):  # a number is never cut in two
        assert not any(re.fullmatch(r"[.,]\d*%?|\d{1,3}[.,]", cell.strip()) for cell in row.split("│")), row


def test_the_column_that_tells_rows_apart_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 60)
    folded = plan(*_calibrate(tmp_path, {}))
    first = "".join(line.split("│")[1].strip() for line in folded.splitlines() if line.startswith("│"))
    assert first.endswith("a_run_with_a_long_name")


def test_numbers_stay_whole_and_names_give_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 60)
    numbers = ("9,876.5", "-1.234", "100.0%", "12.5%", "99.2%")
    words = "tensor-parallel 8, data-parallel 1024, too_large_for_any_accelerator_there_is"
    columns = ("", "layout", *(f"a long header {number}" for number in range(5)))
    output.Table(columns, [("as written", words, *numbers)], "t", (0, 1)).print()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 60
    row = next(line for line in lines if "9,876.5" in line)
    assert [cell.strip() for cell in row.split("│")[3:-1]] == list(numbers)
    told = "".join(line.split("│")[2].strip() for line in lines if line.startswith("│"))
    assert told.replace(" ", "") == words.replace(" ", "")


def test_a_wide_number_is_wider_than_names(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(output, "terminal_width", lambda: 38)
    output.Table(("a", "b", "n"), [("many words " * 9, "x" * 90, "1,234,567,890.5")], "t", (0, 1)).print()
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 38 and any("1,234,567,890.5" in line for line in lines)


def test_a_pipe_is_as_wide_as_tables_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert output.console().width == output.WIDTH
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert output.terminal_width() is None


def test_what_people_wrote_is_no_markup(tmp_path: Path, tiny: dict[str, Any]) -> None:
    config = tmp_path / "a[bold]x[" / "b].yaml"  # as closing markup, [/b]
    config.parent.mkdir()
    write_config(config, tiny)
    assert str(config) in plan("reliability", str(config))
    run = finished(tmp_path / "[red]run", None, tensor_parallel_size=2)
    receipt = receipt_of(run)
    receipt["prediction"]["accelerator"] = "H100[/]"
    write(run, receipt)
    told = plan("calibrate", str(run), "--output", str(tmp_path / "own.yaml"))
    assert "H100[/]: efficiency" in told and "[red]run" in told and (tmp_path / "own.yaml").exists()


def test_json_has_null_for_what_is_infinite() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = plan("reliability", "--rate-per-1000-node-days", "1e-300", "--gpus", "8", "--json")
    facts = json.loads(text, parse_constant=refuse)
    assert None in facts["scales"][0].values()


def test_not_a_number_is_null_wherever_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"a": [1.0, float("inf")], "b": {"c": (float("nan"), "inf")}})
    assert json.loads(capsys.readouterr().out) == {"a": [1.0, None], "b": {"c": [None, "inf"]}}
