"""Log lines: where they go, what they begin with, and who inherits the level."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from launch.runtime.logs import LEVEL, NOISY, configure_logging, get_logger


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(LEVEL, "INFO")
    yield
    monkeypatch.undo()
    configure_logging()


def test_a_command_writes_plain_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    log = get_logger("launch.somewhere")
    log.info("%d steps", 3)
    log.warning("the disk is nearly full")
    log.error("the disk is full")
    assert capsys.readouterr() == (
        "megalite: 3 steps\n",
        "megalite: warning: the disk is nearly full\nmegalite: error: the disk is full\n",
    )


def test_a_rank_names_itself_and_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging(rank=3)
    get_logger("launch.somewhere").info("started")
    assert re.fullmatch(r"\[\d\d:\d\d:\d\d rank 3\] megalite: started\n", capsys.readouterr().out)


@pytest.mark.parametrize(("level", "seen"), [("DEBUG", "dw"), ("INFO", "w"), ("ERROR", "")])
def test_child_processes_inherit_the_level(level: str, seen: str) -> None:
    configure_logging(level)
    code = "from launch.runtime.logs import get_logger; log = get_logger('launch.x'); log.debug('d'); log.warning('w')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert [line[-1] for line in (done.stdout + done.stderr).splitlines()] == list(seen)
    assert logging.getLogger("launch").getEffectiveLevel() == logging.getLevelNamesMapping()[level]


def test_an_unknown_level_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LEVEL, "LOUD")
    configure_logging()
    assert logging.getLogger("launch").getEffectiveLevel() == logging.INFO


def test_libraries_do_not_warn_of_what_no_user_can_change(capfd: pytest.CaptureFixture[str]) -> None:
    configure_logging()
    for name in NOISY:
        logging.getLogger(name).warning("Failed to load _C_mxfp8.cpython-310-x86_64-linux-gnu.so")
    assert capfd.readouterr() == ("", "")
