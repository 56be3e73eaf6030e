"""The output that all commands share."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launch import output
from launch.errors import LaunchError


def test_a_long_command_says_what_it_does_where_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a log file ten silent minutes look like a hang."""
    monkeypatch.setattr(output, "SILENCE_S", 0.05)
    with output.spinner("reading") as describe:
        time.sleep(0.2)
        describe("writing")
        time.sleep(0.2)
    said = capsys.readouterr().err
    assert said.index("megalite: reading (") < said.index("megalite: writing (")
    with output.progress_bar() as report:
        report("comparing", 1, 4)
        time.sleep(0.2)
    assert "megalite: comparing: 25% (" in capsys.readouterr().err
    monkeypatch.setattr(output, "SILENCE_S", 10.0)
    with output.spinner("loading", first_s=0.05):  # imports: the first word comes early, and the next one does not
        time.sleep(0.3)
    assert capsys.readouterr().err.count("megalite: loading (") == 1
    with output.spinner("reading", is_shown=False, first_s=0.05):
        time.sleep(0.2)
    assert capsys.readouterr().err == ""


def test_a_file_in_a_folder_of_the_kernel_is_refused_before_the_work() -> None:
    """Its rights say to root that files can be made there: `plan --html /proc/x.html` failed after the search."""
    with pytest.raises(LaunchError, match="nothing may be written in /proc"):
        output.check_writable(Path("/proc/x.html"))
