"""`megalite ls`: which folders are runs, in which order, and that one broken run does not hide the others."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from launch.errors import LaunchError
from launch.inspection import listing
from launch.inspection.listing import list_runs, row_of
from launch.inspection.status_output import runs_table
from tests.unit.launch.cli.test_mistakes import command
from tests.unit.launch.inspection.conftest import MakeRun


def test_runs_are_found_at_any_depth_the_latest_first_and_not_inside_each_other(
    make_run: MakeRun, tmp_path: Path
) -> None:
    make_run("old", age_s=1e6, ending="ended")
    make_run("group/one/new", age_s=10)
    make_run("group/one/new/checkpoints/inside", age_s=1)
    make_run("a/b/c/d/e/too_deep")
    make_run(".hidden/run")
    (tmp_path / "no_run").mkdir()
    (tmp_path / "no_run" / "config.yaml").touch()  # alone it may be any config
    (tmp_path / "circle").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path / "old")
    runs = list_runs(tmp_path, depth=4)
    assert [run.name for run in runs] == ["group/one/new", "linked", "old"]
    assert [run.status.state for run in runs] == ["failed", "ended", "ended"]
    assert runs[1].checkpoint_bytes == sum(
        path.stat().st_size for path in (tmp_path / "old/checkpoints").rglob("*.json")
    )
    assert "a/b/c/d/e/too_deep" in [run.name for run in list_runs(tmp_path, depth=6)]
    assert [run.name for run in list_runs(tmp_path / "old", depth=0)] == ["old"]


def test_a_run_that_cannot_be_read_is_a_row(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run("good", ending="ended")
    bad, read = make_run("bad"), listing.read_status

    def failing(folder: Path) -> listing.RunStatus:
        if folder == bad:
            raise RecursionError("too deep")
        return read(folder)

    monkeypatch.setattr(listing, "read_status", failing)
    runs = list_runs(tmp_path, depth=1)
    assert [(run.name, run.status.state.value) for run in runs] == [("good", "ended"), ("bad", "unreadable")]
    runs_table(runs).print()
    assert "unreadable" in capsys.readouterr().out
    (folder,) = [run for run in runs if run.name == "bad"]
    assert "too deep" in row_of(folder)["reason"]


def test_names_from_files_are_no_control_sequences(make_run: MakeRun, tmp_path: Path) -> None:
    folder = make_run("evil\x1b[31m[bold]")
    (folder / "receipt.json").write_text(json.dumps({"layout": {"tensor_parallel_size": "\x1b[2J"}}))
    table = runs_table(list_runs(tmp_path, depth=1))
    cells = [cell if isinstance(cell, str) else cell.text for row in table.rows if row for cell in row]
    assert all(cell.isprintable() for cell in cells) and any("[bold]" in cell for cell in cells)


@pytest.mark.parametrize("path", ["nowhere", "file"])
def test_a_folder_that_is_none_is_one_sentence(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="give a folder with runs in it"):
        list_runs(tmp_path / path, depth=1)


def test_the_commands_print_tables_json_and_csv(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_run("good", steps=100, ending="ended", saved=100)
    make_run("killed")
    monkeypatch.chdir(tmp_path)
    code, out, err = command(["ls"], monkeypatch, capfd)
    assert code == 0 and not err
    assert "100/100" in out and "30/100" in out and "tp2 pp1 dp1 zero1 fp32" in out and "failed" in out
    _, out, _ = command(["ls", ".", "--csv"], monkeypatch, capfd)
    assert [(row["run"], row["state"]) for row in csv.DictReader(io.StringIO(out))] == [
        ("killed", "failed"),
        ("good", "ended"),
    ]
    _, out, _ = command(["ls", ".", "--json"], monkeypatch, capfd)
    assert [run["checkpoint"] for run in json.loads(out)["runs"]] == [20, 100]
    assert command(["status", "good"], monkeypatch, capfd)[0] == 0
    code, out, _ = command(["status", "killed", "--json"], monkeypatch, capfd)
    assert code == 1 and json.loads(out)["state"] == "failed"
    code, out, err = command(["ls", "good/checkpoints"], monkeypatch, capfd)
    assert code == 0 and not out and err.startswith("megalite: warning: there is no run in good/checkpoints")


MISTAKES = {
    "no such folder": (["status", "nowhere"], "nowhere does not exist"),
    "a file": (["status", "good/config.yaml"], "is a file"),
    "a folder inside a run": (["status", "good/checkpoints"], "is a part of the run"),
    "a folder above runs": (["status", "."], "`megalite ls .` lists the runs"),
    "ls of nothing": (["ls", "nowhere"], "nowhere does not exist"),
    "two formats": (["ls", ".", "--json", "--csv"], "--json and --csv"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(
    mistake: str, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_run("good", ending="ended")
    monkeypatch.chdir(tmp_path)
    arguments, fragment = MISTAKES[mistake]
    code, out, err = command(arguments, monkeypatch, capfd)
    assert code == 2 and not out
    assert err.startswith("megalite: error: ") and err.count("\n") == 1 and fragment in err, err


def test_of_very_many_runs_the_first_are_listed_without_their_events(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each was kept with up to eight megabytes of events, which nothing of a list shows."""
    for name in ("a", "b", "c"):
        make_run(name)
    monkeypatch.setattr(listing, "MOST_RUNS", 2)
    runs = list_runs(tmp_path, 1)
    assert len(runs) == 2 and all(run.status.events == () and run.status.sessions == 1 for run in runs)
    assert "holds 2 runs or more" in caplog.text
