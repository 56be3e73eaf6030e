"""A copy of a corpus is used only when every file is what its metadata promises, whatever happened on the way."""

import errno
import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.storage import token_cache
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.indexed_writer import IndexedWriter
from data_pipeline.storage.loss_file import LossWriter
from data_pipeline.storage.meta import CorpusMeta
from data_pipeline.storage.token_cache import CorpusCopy

URL = "s3://bucket/far"
AT_ONCE = 1 << 10


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A corpus with a mask of loss, of some five pieces, as `prepare` writes it."""
    monkeypatch.setattr(token_cache, "_AT_ONCE", AT_ONCE)
    prefix, tokens = tmp_path / "there" / "far", np.arange(2600, dtype=np.uint16)
    with IndexedWriter(prefix, np.uint16) as writer, LossWriter(prefix) as loss:
        for first in range(0, 2600, 100):
            writer.append(tokens[first : first + 100], np.array([100]))
            loss.append(np.ones(100, dtype=np.uint8))
    meta = CorpusMeta(
        tokenizer_sha256="", tokenizer="t", vocab_size=2600, eos_token_id=None, token_count=2600, document_count=26,
        dtype="uint16", sha256=writer.bin_sha256, idx_sha256=writer.idx_sha256, sources=[], job_sha256="",
        loss_sha256=loss.sha256,
    )  # fmt: skip
    meta.write(prefix)
    return prefix


class Reader:
    """Reads the files there, and counts the bytes; may be stopped after some of them, as by a kill."""

    def __init__(self, prefix: Path, stop_after: int | None = None) -> None:
        self.prefix, self.left, self.read_bytes = prefix, stop_after, 0

    def __call__(self, ending: str, first: int, stop: int) -> bytes:
        if self.left is not None and self.read_bytes >= self.left:
            raise KeyboardInterrupt
        self.read_bytes += stop - first
        return Path(f"{self.prefix}{ending}").read_bytes()[first:stop]


def copy_of(far: Path) -> CorpusCopy:
    folder = far.parent.parent
    return CorpusCopy(folder / "cache", URL, Path(f"{far}.meta.json").read_bytes(), folder / "private")


def fetch(far: Path, reader: Callable[[str, int, int], bytes]) -> CorpusCopy:
    copy = copy_of(far)
    with copy.locked():
        for ending in copy.digests:
            size = Path(f"{far}{ending}").stat().st_size
            copy.check_size(ending, size)
            copy.fetch(ending, size, partial(reader, ending), lambda count: None)
        copy.finish()
    return copy


def files_of(prefix: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in prefix.parent.glob("far.*")}


def test_a_copy_is_the_corpus_and_is_neither_read_nor_hashed_again(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = fetch(far, Reader(far))
    assert files_of(copy.prefix) == files_of(far) and len(files_of(far)) == 4
    assert IndexedTokens(copy.prefix).document(25).tolist() == list(range(2500, 2600))
    monkeypatch.setattr(token_cache, "_sha256", None)
    assert copy_of(far).is_complete


@pytest.mark.parametrize("stop_after", range(0, 9000, 900))
def test_a_fetch_that_is_killed_anywhere_leaves_no_file_that_is_not_whole_and_goes_on(
    far: Path, stop_after: int
) -> None:
    """A half file under its final name, or a part that is counted twice."""
    killed, whole = Reader(far, stop_after), sum(Path(f"{far}{end}").stat().st_size for end in copy_of(far).digests)
    try:
        fetch(far, killed)
    except KeyboardInterrupt:
        copy = copy_of(far)
        assert not copy.is_complete
        for name, content in files_of(copy.prefix).items():
            assert content == files_of(far)[name], "it has its name and is not whole"
    second = Reader(far)
    copy = fetch(far, second)
    assert copy.is_complete and files_of(copy.prefix) == files_of(far)
    assert killed.read_bytes + second.read_bytes == whole, "a byte was fetched twice, or never"


def test_a_part_that_is_damaged_is_fetched_again(far: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        fetch(far, Reader(far, 2 * AT_ONCE))
    (part,) = copy_of(far).folder.glob(".*.part")
    part.write_bytes(b"\xff" * part.stat().st_size)
    assert files_of(fetch(far, Reader(far)).prefix) == files_of(far)
    longer = copy_of(far).folder / ".far.bin.part"  # of another size than the file has
    Path(f"{copy_of(far).prefix}.bin").unlink()
    longer.write_bytes(b"\xff" * 9000)
    assert files_of(fetch(far, Reader(far)).prefix) == files_of(far)


@pytest.mark.parametrize("ending", [".bin", ".idx", ".loss.bin"])
def test_other_bytes_than_the_metadata_promises_are_never_used(far: Path, ending: str) -> None:
    """A digest that is not compared, or compared for one of the files alone."""
    path = Path(f"{far}{ending}")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"s3://bucket/far{ending} is not the file that was written: its SHA-256 is"):
        fetch(far, Reader(far))
    copy = copy_of(far)
    assert not copy.is_complete and not Path(f"{copy.prefix}{ending}").exists()
    assert not list(copy.folder.glob(f".far{ending}.part"))


def test_a_file_of_another_length_is_refused_before_it_is_fetched(far: Path) -> None:
    copy = copy_of(far)
    with pytest.raises(DataError, match=r"far\.bin has 5,198 bytes, and by .* it must have 5,200: upload it again"):
        copy.check_size(".bin", 5198)
    with pytest.raises(DataError, match=r"far\.idx does not exist, but s3://bucket/far\.meta\.json names it"):
        copy.check_size(".idx", None)


@pytest.mark.parametrize("change", ["content", "length", "removed", "touched"])
def test_a_copy_that_was_changed_is_no_longer_complete_and_is_mended(far: Path, change: str) -> None:
    copy = fetch(far, Reader(far))
    path = Path(f"{copy.prefix}.bin")
    match change:
        case "content":
            path.write_bytes(bytes(path.stat().st_size))
            os.utime(path, ns=(1, 1))
        case "length":
            path.write_bytes(path.read_bytes()[:-2])
        case "removed":
            path.unlink()
        case "touched":
            os.utime(path, ns=(1, 1))
    assert not copy_of(far).is_complete
    reader = Reader(far)
    assert fetch(far, reader).is_complete and files_of(copy.prefix) == files_of(far)
    assert reader.read_bytes == (0 if change == "touched" else 5200)


def test_another_corpus_at_the_url_is_another_copy(far: Path) -> None:
    before = fetch(far, Reader(far))
    meta = CorpusMeta(**json.loads(Path(f"{far}.meta.json").read_bytes()))
    replace(meta, sources=["another"]).write(far)
    after = copy_of(far)
    assert after.folder != before.folder and not after.is_complete and before.is_complete


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"dtype": "nonsense"}, "not readable as metadata"),
        ({"sha256": "xy"}, "not readable as metadata"),
        ({"sha256": None}, "not readable as metadata"),
        ({"token_count": "many"}, "not readable as metadata"),
        ({"format": "other"}, "has format 'other'"),
        ({"surprise": 1}, "not readable as metadata"),
    ],
)
def test_metadata_that_is_none_is_a_sentence(far: Path, change: dict[str, Any], sentence: str) -> None:
    fields = json.loads(Path(f"{far}.meta.json").read_bytes()) | change
    with pytest.raises(DataError, match=f"s3://bucket/far.meta.json .*{sentence}|{sentence}"):
        CorpusCopy(far.parent, URL, json.dumps(fields).encode(), far)


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_sentences(
    far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __init__(self, part: Path) -> None:
            self.stream = part.open("w+b")

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            self.stream.close()

        def read(self, count: int) -> bytes:
            return b""

        def tell(self) -> int:
            return 0

        def write(self, content: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "_opened", Full)
        with pytest.raises(DataError, match=r"has no room for the copy of s3://bucket/far: remove copies there"):
            fetch(far, Reader(far))
    assert fetch(far, Reader(far)).is_complete
    (far.parent / "file").touch()
    copy = CorpusCopy(far.parent / "file", URL, Path(f"{far}.meta.json").read_bytes(), far)
    with pytest.raises(DataError, match=r"cannot be written \(Not a directory\): set data\.cache to"), copy.locked():
        pass


def test_a_file_system_without_locks_is_refused(far: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(DataError, match="on a file system without locks"):
        fetch(far, Reader(far))


def test_a_link_in_the_place_of_a_part_is_not_written_through(far: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    copy = copy_of(far)
    copy.folder.mkdir(parents=True)
    (copy.folder / ".far.bin.part").symlink_to(victim)
    assert fetch(far, Reader(far)).is_complete
    assert victim.read_bytes() == b"mine"


STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def give_to_stranger(copy: CorpusCopy) -> None:
    """Makes what is in the cache another user's, with the stamp that such a user would write."""
    folder = copy.folder
    (folder / "complete.json").write_text(json.dumps(copy._stamp()))
    for path in (folder, *folder.iterdir()):
        os.chown(path, STRANGER, STRANGER)


@as_root
def test_a_copy_that_another_user_has_written_is_hashed_once_and_read_through_links_of_ours(far: Path) -> None:
    """What a stranger has put into a shared folder believed by its own stamp, or hashed at every start."""
    give_to_stranger(fetch(far, Reader(far)))
    copy, hashed = copy_of(far), list[int]()
    assert copy.is_foreign and not copy.is_complete
    with copy.locked():
        copy.prove_foreign(hashed.append)
    assert sum(hashed) == sum(Path(f"{far}{end}").stat().st_size for end in copy.digests)
    assert copy_of(far).is_complete and files_of(copy_of(far).prefix) == files_of(far)
    assert copy.prefix.is_relative_to(far.parent.parent / "private")
    assert not list(copy.prefix.parent.glob("*.npy")), "a stranger's plan of packing is not among them"
    with copy.locked():  # for a plan that is looked for
        assert copy_of(far).is_complete, "it would be hashed again"
    (shared,) = (far.parent.parent / "cache").iterdir()
    with (shared / "far.bin").open("r+b") as stream:  # in place, and with its old times
        stream.write(b"\x07")
    assert not copy_of(far).is_complete, "its owner has changed it since"


@as_root
@pytest.mark.parametrize("change", ["other", "missing"])
def test_a_copy_of_another_user_that_is_not_the_corpus_is_refused(far: Path, change: str) -> None:
    fetch(far, Reader(far))
    copy = copy_of(far)
    path = Path(f"{copy.prefix}.bin")
    path.write_bytes(bytes(path.stat().st_size))
    give_to_stranger(copy)
    if change == "missing":
        path.unlink()
    says = r"it lacks far\.bin: let its owner" if change == "missing" else r"its far\.bin is not the file that s3://"
    with copy.locked(), pytest.raises(DataError, match=rf"belongs to user number {STRANGER}, not to you, and {says}"):
        copy.prove_foreign(lambda count: None)
    assert not copy_of(far).is_complete


@pytest.mark.parametrize("loose", ["folder", "far.bin", "far.pack-32-train-0.1.npy"])
def test_a_folder_of_ours_that_others_could_write_is_closed_to_them_and_hashed_again(far: Path, loose: str) -> None:
    copy = fetch(far, Reader(far))
    plan = Path(f"{copy.prefix}.pack-32-train-0.1.npy")
    plan.write_bytes(b"anybody's")
    path = copy.folder if loose == "folder" else copy.folder / loose
    path.chmod(0o777)
    if loose == "far.bin":
        content = path.read_bytes()
        state = path.stat()
        path.write_bytes(b"\x07" + content[1:])
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert not copy_of(far).is_complete
    fetch(far, Reader(far))
    assert copy_of(far).is_complete and files_of(copy.prefix) == files_of(far), "the plan is gone, the tokens are right"
    assert not any(one.stat().st_mode & 0o022 for one in (copy.folder, *copy.folder.iterdir()))


def test_under_umask_0_nobody_else_can_write_what_is_made_here(far: Path) -> None:
    former = os.umask(0)
    try:
        copy = fetch(far, Reader(far))
    finally:
        os.umask(former)
    made = (copy.folder.parent, copy.folder, *copy.folder.iterdir())
    assert not [(path.name, oct(path.stat().st_mode)) for path in made if path.stat().st_mode & 0o022]
