"""Small files of a run: what strangers put in their place is neither followed, waited for, nor written into."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megalite.checkpoint.durable_files import write_durably
from megalite.checkpoint.safe_files import (
    UnsafeFile,
    forbid_writing_by_all,
    make_folder,
    open_new,
    open_to_write,
    read_end,
    read_small_file,
    write_small_file,
)

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("no_umask")
def test_nobody_else_may_write_what_is_made_without_a_umask(tmp_path: Path) -> None:
    write_small_file(tmp_path / "log", b"line\n", append=True)
    write_durably(tmp_path / "config", b"x")
    make_folder(tmp_path / "folder")
    make_folder(tmp_path / "own", private=True)
    write_small_file(tmp_path / "own" / "secret", b"x", private=True)
    os.close(open_new(tmp_path / "own" / "new", private=True))
    modes = [mode(tmp_path / name) for name in ("log", "config", "folder", "own", "own/secret", "own/new")]
    assert modes == [0o644, 0o644, 0o755, 0o700, 0o600, 0o600]
    for name, loose in {"log": 0o666, "own/secret": 0o644, "own": 0o755}.items():  # of an older version
        (tmp_path / name).chmod(loose)
    make_folder(tmp_path / "own", private=True)
    write_small_file(tmp_path / "own" / "secret", b"y", private=True)
    write_small_file(tmp_path / "log", b"more\n", append=True)
    assert [mode(tmp_path / name) for name in ("log", "own", "own/secret")] == [0o644, 0o700, 0o600]
    assert (tmp_path / "log").read_bytes() == b"line\nmore\n" and (tmp_path / "own/secret").read_bytes() == b"y"


def test_a_group_may_write_where_it_may_write_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    before = os.umask(0o002)
    try:
        write_durably(tmp_path / "config", b"x")
        make_folder(tmp_path / "own", private=True)
    finally:
        os.umask(before)
    assert mode(tmp_path / "config") == 0o664 and mode(tmp_path / "own") == 0o770


@pytest.mark.parametrize(
    ("mask", "after"), [(0, 0o022), (0o020, 0o022), (0o002, 0o002), (0o022, 0o022), (0o077, 0o077)]
)
def test_a_umask_that_somebody_has_chosen_stays(mask: int, after: int) -> None:
    before = os.umask(mask)
    forbid_writing_by_all()
    assert os.umask(before) == after


@as_root
def test_a_file_of_a_stranger_is_not_written_into(tmp_path: Path) -> None:
    """Unless he owns the folder, as where a file server gives root's files to nobody, or a group shares it."""
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"his")
    os.chown(path, NOBODY, NOBODY)
    for work in (lambda: open_to_write(path), lambda: read_small_file(path, 99, trusted=True)):
        with pytest.raises(UnsafeFile, match=r"events.jsonl belongs to user \S+, neither to you nor .*: remove it, or"):
            work()
    assert path.read_bytes() == b"his" and read_small_file(path, 99) == b"his"
    os.chown(tmp_path, NOBODY, NOBODY)
    write_small_file(path, b"+ours", append=True)
    os.chown(tmp_path, 0, 0)
    tmp_path.chmod(0o770)
    write_small_file(path, b"+ours", append=True)
    assert path.read_bytes() == b"his+ours+ours"


@pytest.mark.parametrize(
    ("what", "plant"),
    {
        "a symbolic link": lambda path: path.symlink_to(path.with_name("victim")),
        "a named pipe": os.mkfifo,
        "a folder": Path.mkdir,
        "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    }.items(),
)
def test_what_is_no_file_is_named(tmp_path: Path, what: str, plant: Callable[[Path], object]) -> None:
    (tmp_path / "victim").write_bytes(b"precious")
    plant(tmp_path / "log")
    for work in (
        lambda: open_to_write(tmp_path / "log"),
        lambda: read_small_file(tmp_path / "log", 99),
        lambda: read_end(tmp_path / "log", 99),
    ):
        with pytest.raises(UnsafeFile, match=f"^{tmp_path}/log is {what}, where a run has a file of its own: move it"):
            work()
    with pytest.raises(FileExistsError):
        open_new(tmp_path / "log")
    if what != "a folder":
        with pytest.raises(UnsafeFile, match=f"log is {what}, where a run has a folder: move it away, or choose"):
            make_folder(tmp_path / "log", private=True)
    assert (tmp_path / "victim").read_bytes() == b"precious"


def test_a_private_file_s_folder_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "own").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFile, match="own is a symbolic link, where a run has a folder"):
        write_small_file(tmp_path / "own" / "file", b"x", private=True)
    assert list((tmp_path / "elsewhere").iterdir()) == []
    write_small_file(tmp_path / "own" / "file", b"x")  # a run's folder may be a link to other storage
    assert (tmp_path / "elsewhere" / "file").read_bytes() == b"x"


def test_reading_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    assert read_small_file(path, 3) == b"" and read_end(path, 3) == b""
    path.write_bytes(b"abcd")
    assert read_small_file(path, 4) == b"abcd" and read_end(path, 3) == b"bcd" and read_end(path, 9) == b"abcd"
    with pytest.raises(UnsafeFile, match="has more than 3 bytes"):
        read_small_file(path, 3)
    with pytest.raises(FileNotFoundError):
        read_small_file(tmp_path / "missing", 3)


def test_a_temporary_file_of_others_is_left_alone(tmp_path: Path) -> None:
    """Also where it has a second name, which belongs to a file that must not change."""
    (tmp_path / "victim").write_bytes(b"precious")
    for plant in (
        lambda path: path.symlink_to(tmp_path / "victim"),
        lambda path: path.hardlink_to(tmp_path / "victim"),
        os.mkfifo,
        Path.mkdir,
    ):
        plant(tmp_path / ".config.tmp")
        write_durably(tmp_path / "config", b"new")
        assert (tmp_path / "config").read_bytes() == b"new" and not (tmp_path / "config").is_symlink()
        assert (tmp_path / "victim").read_bytes() == b"precious"
        left = tmp_path / ".config.tmp"
        if os.path.lexists(left):
            left.rmdir() if left.is_dir() else left.unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "victim"]
