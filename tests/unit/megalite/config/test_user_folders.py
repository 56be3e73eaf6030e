"""Homes that are not there, as in containers that run as a number without an entry in /etc/passwd."""

from __future__ import annotations

import getpass
import os
import pwd
import sys
from pathlib import Path
from typing import Any

import pytest

from launch import __main__ as entry
from launch.cluster.doctor.security import security_findings
from launch.runtime.forwarded_environment import user_environment_files
from launch.runtime.host_probe import compile_locks
from megalite.config import user_folders
from megalite.config.user_folders import cache_folder, ensure_home, settings_folder

NAMES = ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "MPLCONFIGDIR")


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place of temporary files on a machine that knows no name and no home of this user."""

    def unknown(number: int) -> Any:
        raise KeyError(number)

    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is as before after the test
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        os, "access", lambda path, mode: mode == os.R_OK or Path(path).is_relative_to(tmp_path / "mine")
    )  # tests may be root
    return tmp_path / f"megalite_{os.getuid()}"


@pytest.mark.parametrize("home", [None, "", "/", "/nonexistent/home", "relative"])
def test_nothing_needs_a_home(home: str | None, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled training, the doctor and what reads ~/.deepspeed_env have ended in a traceback there."""
    if home is not None:
        monkeypatch.setenv("HOME", home)
    assert cache_folder() == temporary / ".cache" / "megalite" and settings_folder().is_relative_to(temporary)
    assert Path.home() == temporary and temporary.stat().st_mode & 0o777 == 0o700
    assert getpass.getuser() == str(os.getuid())
    assert user_environment_files({}) == [temporary / ".deepspeed_env"] and compile_locks([], ["async_io"]) == []


def test_a_command_needs_no_home(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hosts").write_text("node1 slots=1\n")
    monkeypatch.setenv("PATH", str(tmp_path))  # no ssh
    monkeypatch.setattr(sys, "argv", ["megalite", "doctor", "--hostfile", str(tmp_path / "hosts")])
    with pytest.raises(SystemExit) as left:
        entry.main()
    assert left.value.code == 1 and "1 of 1 host can NOT train: node1" in capsys.readouterr().out


def test_a_home_that_cannot_be_written_keeps_its_settings(
    temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == temporary / "megalite" and Path(os.environ["MPLCONFIGDIR"]).parent == temporary
    assert settings_folder() == tmp_path / ".config" / "megalite" and Path.home() == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert cache_folder() == Path("/scratch/cache/megalite"), "what the user has named stays"


def test_a_home_of_the_kernel_takes_no_caches_though_root_may_write_everywhere(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: True)
    monkeypatch.setenv("HOME", "/proc")
    assert cache_folder() == temporary / "megalite" and Path(os.environ["MPLCONFIGDIR"]).parent == temporary


def test_a_home_is_left_as_it_is(temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "mine" / "new"))  # it can be made
    (tmp_path / "mine").mkdir()
    before = dict(os.environ)
    assert cache_folder() == tmp_path / "mine" / "new" / ".cache" / "megalite"
    assert dict(os.environ) == before | {"USER": str(os.getuid())} and not temporary.exists()


@pytest.mark.parametrize("taken", ["link", "open", "file"])
def test_a_folder_that_somebody_else_has_put_there_is_not_used(taken: str, temporary: Path, tmp_path: Path) -> None:
    """Compiled code of the cache is run: whoever could write it there would run code as this user."""
    if taken == "link":
        (tmp_path / "theirs").mkdir()
        temporary.symlink_to(tmp_path / "theirs")
    elif taken == "open":
        temporary.mkdir()
        temporary.chmod(0o777)
    else:
        temporary.touch()
    folder = user_folders._temporary_folder()
    assert folder != temporary and folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700


def test_the_doctor_looks_at_the_shell_of_a_user_without_a_home(temporary: Path) -> None:
    ensure_home()
    answers: Any = type("Answers", (), {"there": {}, "settings": type("Settings", (), {"run_dir": None})})
    assert security_findings(answers, {"RAY_ADDRESS": "head:6379"})
