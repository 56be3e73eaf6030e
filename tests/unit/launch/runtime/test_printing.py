"""What a stranger wrote is shown on a terminal, never obeyed by it."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import sys
import time
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import LaunchError
from launch.output import Table, console, print_csv, print_json, progress_bar, spinner, styled
from launch.runtime.logs import get_logger
from launch.runtime.printing import escape_what_cannot_be_written, print_exception, print_result, say, visible
from launch.runtime.rank_process import log_once

TITLE, CURSOR, C1, OVERRIDE = "\x1b]0;owned\x07", "\x1b[2J", "\x9b31m", "\u202e"
HARM = f"a{TITLE}b{CURSOR}{C1}{OVERRIDE}\rc"
SHOWN = r"a\x1b]0;owned\x07b\x1b[2J\x9b31m\u202e\rc"


def harmless(text: str) -> bool:
    return not any(
        unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") or "\u202a" <= character <= "\u202e"
        for character in text.replace("\n", "").replace("\t", "")
    )


@given(st.text(st.characters(), max_size=50))
def test_no_text_controls_a_terminal_once_it_is_visible(text: str) -> None:
    shown = visible(text.replace("\r\n", "\n"))
    assert harmless(shown) and visible(shown) == shown
    if harmless(text):
        assert shown == text
    shown.encode()  # half a surrogate pair, as in a file's name that is not UTF-8, would be an error of its own


def test_line_breaks_tabs_and_every_language_stay() -> None:
    text = "a\tb\nc\r\nnaïve 漢字 🙂 שלום\u200f e\u0301"
    assert visible(text) == text


WAYS: dict[str, Callable[[], object]] = {
    "say": lambda: say("said", HARM, end=f"{CURSOR}\n", flush=True),
    "log": lambda: get_logger("launch.somewhere").info("%s", HARM),
    "warning": lambda: get_logger("megalite.somewhere").warning("%s", HARM),
    "rank": lambda: log_once(HARM, None),
    "traceback": lambda: print_exception(ValueError, ValueError(HARM), None),
    "table": lambda: Table([HARM, "b"], [[HARM, "1"], styled([HARM, "2"], "red"), None], HARM).print(),
    "console": lambda: console(stderr=True).print(HARM),
    "JSON": lambda: print_json({HARM: HARM}),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_printing_shows_it(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    WAYS[way]()
    said = "".join(capsys.readouterr())
    assert harmless(said) and "owned" in said
    if way not in ("table", "JSON"):  # a table breaks words, and JSON has its own escapes
        assert SHOWN in said


def test_what_an_encoding_lacks_is_shown_as_an_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    written = {name: io.TextIOWrapper(io.BytesIO(), "ascii") for name in ("stdout", "stderr")}
    for name, stream in written.items():
        monkeypatch.setattr(sys, name, stream)
    escape_what_cannot_be_written()
    say("runs/lañg", flush=True)
    print_result("lañg", flush=True)
    Table(["run"], [["lañg"]]).print()
    log_once("no lañg", None)
    assert written["stdout"].buffer.getvalue().count(b"la\\xf1g") == 3  # type: ignore[attr-defined]
    assert b"no la\\xf1g" in written["stderr"].buffer.getvalue()  # type: ignore[attr-defined]


def test_commands_succeed_without_standard_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """`megalite status RUN >&-` ended with a traceback and 1, where all had been done."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    escape_what_cannot_be_written()
    for name in WAYS:
        WAYS[name]()
    print_result("result", flush=True)
    assert sys.stdout is not None and sys.stdout.fileno() == 1


def test_progress_shows_it_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("launch.output.SILENCE_S", 0.01)
    said, limit = "", time.monotonic() + 10
    with spinner(HARM), progress_bar() as report:
        report(HARM, 1, 2)
        while ("c (" not in said or "c: 50%" not in said) and time.monotonic() < limit:
            said += capsys.readouterr().err
    assert harmless(said) and f"{SHOWN} (" in said and f"{SHOWN}: 50%" in said


def test_progress_on_a_terminal_shows_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TERM": "xterm", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    reader, terminal = pty.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with spinner(f"1{HARM}") as describe:
            describe(f"2{HARM}")
        with progress_bar() as report:
            report(f"3{HARM}", 1, 2)
        monkeypatch.undo()
        stream.flush()
        said = ""
        while select.select([reader], [], [], 0)[0]:
            said += os.read(reader, 100_000).decode()
    os.close(reader)
    rich_own = r"\x1b\[(?:\?25[lh]|2K|1A|[\d;]*m)|\r"  # cursor off and on, a line cleared, one line up, colours
    assert harmless(re.sub(rich_own, "", said))
    assert all(f"{number}{SHOWN}" in said for number in (1, 2, 3))


def test_a_result_is_exact_for_a_program_and_visible_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    print_result(HARM.removesuffix("\rc"), end="")
    print_csv([{"a": CURSOR}])
    assert capsys.readouterr().out == HARM.removesuffix("\rc") + f"a\n{CURSOR}\n"
    reader, terminal = pty.openpty()
    with os.fdopen(terminal, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        print_result(HARM, flush=True)
        print_csv([{"a": CURSOR}])
        stream.flush()
        said = ""
        while said.count("\n") < 3:
            said += os.read(reader, 1000).decode()
        monkeypatch.undo()
    os.close(reader)
    assert said.replace("\r\n", "\n") == f"{SHOWN}\na\n\\x1b[2J\n"


def test_colours_of_our_own_stay() -> None:
    """The escapes of our tables are not text of strangers."""
    from rich.console import Console

    screen = io.StringIO()
    table = Table(["a"], [styled([HARM], "red")])
    table.print(Console(file=screen, force_terminal=True, color_system="standard"))
    drawn = screen.getvalue()
    assert "\x1b[31m" in drawn and TITLE not in drawn and CURSOR not in drawn


def test_a_sentence_of_an_error_is_not_changed_where_it_is_made() -> None:
    assert str(LaunchError(HARM)) == HARM
