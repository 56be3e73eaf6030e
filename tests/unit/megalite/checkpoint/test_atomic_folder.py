"""A folder that appears whole or not at all, through kills, full disks, and two processes that want one name."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.checkpoint import atomic_folder as module
from megalite.checkpoint.atomic_folder import check_room, new_folder
from megalite.checkpoint.errors import CheckpointError

MARKER = "config.json"
INNER = "additional_chat_templates"


def _fill(folder: Path, text: str = "new", overwrite: bool = False) -> None:
    with new_folder(folder, overwrite=overwrite, marker=MARKER) as new:
        (new / MARKER).write_text(text)
        (new / INNER).mkdir()
        (new / INNER / "file").write_text(text)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def in_a_child(action: Callable[[], None]) -> int:
    """Runs `action` in a fork of this process; its exit code, negative for a signal."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "hf"
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), new_folder(target, overwrite=False, marker=MARKER) as new:
            (new / MARKER).write_text("{}")
            raise error("interrupted")
        assert _names(target.parent) == []
    target.mkdir()  # an empty folder is as good as none
    _fill(target)
    assert _names(target.parent) == ["hf"] and _names(target) == [INNER, "config.json"]
    assert (target / INNER / "file").read_text() == "new"


def test_what_is_there_is_kept_unless_overwriting_is_asked_for_and_safe(tmp_path: Path) -> None:
    target = tmp_path / "hf"
    _fill(target, "old")
    with pytest.raises(CheckpointError, match="not empty"):
        _fill(target)
    with pytest.raises(RuntimeError), new_folder(target, overwrite=True, marker=MARKER):
        raise RuntimeError("failed")
    assert (target / MARKER).read_text() == "old"
    _fill(target, overwrite=True)
    assert (target / MARKER).read_text() == "new" and _names(tmp_path) == ["hf"]

    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"has no config\.json, so it is nothing of this kind"):
        _fill(home, overwrite=True)
    with pytest.raises(CheckpointError) as told:
        _fill(home)
    assert "overwrite" not in str(told.value).replace("not overwritten", ""), "it would be refused then"
    with pytest.raises(CheckpointError, match="is a file"):
        _fill(home / "thesis.tex")
    with pytest.raises(CheckpointError, match=r"thesis\.tex: is a file"):
        _fill(home / "thesis.tex" / "hf")
    assert _names(home) == ["thesis.tex"]


def test_what_lies_inside_or_comes_meanwhile_is_not_lost(tmp_path: Path) -> None:
    """A checkpoint is exported over the folder that it lies in; two make one name one after the other."""
    target = tmp_path / "hf"
    _fill(target, "old")
    (target / "checkpoint").mkdir()
    with pytest.raises(CheckpointError, match="holds a folder checkpoint, which would be lost"):
        _fill(target, overwrite=True)
    assert (target / "checkpoint").is_dir() and (target / MARKER).read_text() == "old"

    other = tmp_path / "other"
    with (
        pytest.raises(CheckpointError, match="is there already"),
        new_folder(other, overwrite=False, marker=MARKER) as new,
    ):
        (new / MARKER).write_text("second")
        other.mkdir()
        (other / MARKER).write_text("first")
    assert (other / MARKER).read_text() == "first" and _names(tmp_path) == ["hf", "other"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_a_killed_process_leaves_is_removed_by_the_next(tmp_path: Path, overwrite: bool) -> None:
    """Also where the next one makes a folder of another name beside it."""
    target = tmp_path / "hf"
    if overwrite:
        _fill(target, "old")

    def killed() -> None:
        with new_folder(target, overwrite=overwrite, marker=MARKER) as new:
            (new / "half").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(killed) == -signal.SIGKILL
    assert ".hf.tmp" in _names(tmp_path) and target.exists() == overwrite
    _fill(tmp_path / "other")
    assert _names(tmp_path) == (["hf", "other"] if overwrite else ["other"])
    assert not overwrite or (target / MARKER).read_text() == "old"


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_kill_while_a_folder_is_replaced_costs_neither_the_old_nor_the_new_one(tmp_path: Path, renames: int) -> None:
    """Two renames make the exchange; a kill may come before, between and after them."""
    target = tmp_path / "hf"
    _fill(target, "old")
    original, remove, count = Path.rename, module.remove, [0]

    def rename(self: Path, other: Path) -> Path:
        if count[0] == renames:
            os.kill(os.getpid(), signal.SIGKILL)
        count[0] += 1
        return original(self, other)

    def killed() -> None:
        Path.rename = rename  # type: ignore[method-assign,assignment]
        # of two renames the second is the last chance: then before the old one is removed
        module.remove = lambda path: os.kill(os.getpid(), signal.SIGKILL) if count[0] == 2 else remove(path)
        _fill(target, "new", overwrite=True)

    assert in_a_child(killed) == -signal.SIGKILL
    _fill(tmp_path / "other")
    assert _names(tmp_path) == ["hf", "other"]
    assert (target / MARKER).read_text() in ("old", "new")
    assert (target / INNER / "file").read_text() == (target / MARKER).read_text()


def test_two_that_want_one_name_do_not_mix(tmp_path: Path) -> None:
    target = tmp_path / "hf"

    def second() -> None:
        with pytest.raises(CheckpointError, match="another conversion is writing there"):
            _fill(target)
        _fill(tmp_path / "other")  # beside it there is room

    with new_folder(target, overwrite=False, marker=MARKER) as new:
        (new / MARKER).write_text("first")
        assert in_a_child(second) == 0
        assert (new / MARKER).read_text() == "first"
    assert _names(tmp_path) == ["hf", "other"]


def test_a_save_of_a_run_beside_it_is_left_alone(tmp_path: Path) -> None:
    """A run's own temporary folder has no lock of ours, and its writer is alive."""
    (tmp_path / ".step_00000010.tmp").mkdir()
    _fill(tmp_path / "hf")
    assert _names(tmp_path) == [".step_00000010.tmp", "hf"]


def test_a_write_that_fails_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """The limit of a file's size stands for a full disk: a write fails in the middle of a file."""

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with (
            pytest.raises(CheckpointError, match=r"hf: cannot be written: File too large$"),
            new_folder(tmp_path / "hf", overwrite=False, marker=MARKER) as new,
        ):
            (new / MARKER).write_bytes(bytes(5000))

    assert in_a_child(limited) == 0
    assert _names(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"takes 10,000,000,000,000.0 MB, and .* MB are free: free some space"):
        check_room(tmp_path / "deep" / "hf", 10**19)
    started = time.monotonic()
    check_room(tmp_path / "hf", 1000)
    assert time.monotonic() - started < 5
