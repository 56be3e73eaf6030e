"""A kill at any moment, a harmed copy, a wrong bucket: no half copy looks whole, one sentence says what is wrong."""

from __future__ import annotations

import hashlib
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import Mock

import pytest

from megalite.checkpoint.errors import CheckpointError, StorageError
from megalite.checkpoint.manifest import LATEST, MANIFEST, FileEntry
from megalite.checkpoint.remote.errors import explained
from megalite.checkpoint.remote.storage import Listed, Store, check_url, inspect_checkpoint
from megalite.checkpoint.remote.transfer import MARK, fetch_newest, newest_on_mirror, prune_store, upload
from megalite.checkpoint.retention import Retention
from tests.helpers.mirrors import (
    SHORT,
    complete,
    files_of,
    mirror_to,
    own_client,
    pending_uploads,
    rewrite_manifest,
    until,
    write_large,
)
from tests.helpers.s3_server import Fault, Gate, Request
from tests.helpers.saving import forge
from tests.helpers.single_rank import write_single
from tests.helpers.uploading import start_prune, start_upload
from tests.unit.megalite.checkpoint.test_commit import WEIGHTS, same_size_garbage, truncate, write


def killed_at_change(number: int, s3: Gate, start: Callable[[], BaseProcess]) -> bool:
    """Kills a process by SIGKILL when it makes its `number`-th change of the store; False where it makes fewer."""
    changes = 0

    def is_fatal(request: Request) -> bool:
        nonlocal changes
        changes += is_change(request)
        return is_change(request) and changes == number

    s3.is_open.clear()
    s3.faults = [Fault(is_fatal, "stall", 1)]
    process = start()
    until(lambda: s3.faults[0].times == 0 or not process.is_alive())
    is_killed = process.is_alive()
    process.kill()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if is_killed else 0)
    s3.mend()
    return is_killed


def is_change(request: Request) -> bool:
    return request.method in ("PUT", "POST", "DELETE")


def is_sound(store: Store, listed: Listed) -> bool:
    """Whether every file is the one that the manifest means."""
    assert listed.manifest is not None
    found = {name: store.read(f"{listed.name}/{name}") or b"" for name in listed.manifest.files}
    return all(hashlib.sha256(found[name]).hexdigest() == file.sha256 for name, file in listed.manifest.files.items())


@pytest.mark.slow
def test_killed_at_every_change_of_an_upload_no_half_copy_looks_whole(s3: Gate, place: str, tmp_path: Path) -> None:
    """SIGKILL at each PUT, POST and DELETE in turn, over an older copy with files of the same sizes."""
    old, new = write(tmp_path / "old", 1), tmp_path / "new/step_00000001"
    other = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    write_single(new, other.items(), step=1, config={"model": {}}, tokenizer=None, state={})
    store = Store(place, SHORT)
    for number in range(1, 20):
        upload(store, old, {})
        is_killed = killed_at_change(number, s3, partial(start_upload, place, new))
        listed = inspect_checkpoint(store, new.name)
        assert listed.problem is not None or is_sound(store, listed), "old and new are mixed"
        upload(store, new, {})
        listed = inspect_checkpoint(store, new.name)
        assert listed.problem is None and is_sound(store, listed)
        assert set(store.entries(new.name)[0]) == set(files_of(new))
        if not is_killed:
            break
    assert number > 5, "the kills did not reach an upload's moments"


@pytest.mark.slow
def test_killed_at_every_change_of_a_deletion_no_half_copy_looks_whole(s3: Gate, place: str, tmp_path: Path) -> None:
    store = Store(place, SHORT)
    upload(store, write(tmp_path, 2), {})
    for number in range(1, 20):
        upload(store, write(tmp_path, 1), {})
        is_killed = killed_at_change(number, s3, partial(start_prune, place))
        problem = inspect_checkpoint(store, "step_00000001").problem
        assert problem is None or MANIFEST in problem, "files have gone before the manifest"
        if not is_killed:
            break
        prune_store(store, Retention(1), set())
        assert store.entries()[1] == ["step_00000002"], "left-overs stay"
    assert number > 3, "the kills did not reach a deletion's moments"


@pytest.mark.slow
def test_killed_in_the_middle_of_a_large_file_its_parts_do_not_stay(s3: Gate, place: str, tmp_path: Path) -> None:
    folder = write_large(tmp_path, 1)
    assert killed_at_change(3, s3, partial(start_upload, place, folder))  # mark, begin, a part
    assert len(pending_uploads()) == 1 and newest_on_mirror(place, SHORT) is None
    mirror, _ = mirror_to(place)
    mirror.on_commit(folder)
    assert mirror.close(60) and complete(place) == [folder.name] and not pending_uploads()


def test_other_runs_unfinished_uploads_are_left_alone(place: str, tmp_path: Path) -> None:
    key = place.removeprefix("s3://bucket/")
    for other in (f"{key}2/step_00000001/w", f"{key}/step_00000001/w"):
        own_client().call_s3("create_multipart_upload", Bucket="bucket", Key=other)
    Store(place).abort_uploads("step_")
    assert pending_uploads() == [f"{key}2/step_00000001/w"]
    Store(f"{place}2").abort_uploads("step_")


def on_mirror(tmp_path: Path, *steps: int) -> str:
    """A `file:` mirror whose checkpoints can be harmed by hand."""
    url = f"file://{tmp_path}/far"
    for step in steps:
        upload(Store(url), write(tmp_path / "near", step), {})
    return url


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (truncate, "50 bytes, not"),
    "tampered with": (same_size_garbage, "digest differs"),
    "half uploaded": (lambda f: ((f / MANIFEST).unlink(), (f / MARK).touch()), "upload was interrupted"),
    "a file missing": (lambda f: (f / "single_000.safetensors").unlink(), "is missing"),
    "another program's": (lambda f: (f / MANIFEST).write_text("{}"), "not a manifest"),
    "outside its folder": (lambda f: forge(f, "single_000", "../single_000"), "outside its folder"),
    "changed by hand": (
        lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text().replace('"step": 2', '"step": 3')),
        "manifest.json: has changed",
    ),
    "numbers it has not": (lambda f: forge(f, '"b.bias": [', '"b.bias": [9999,'), "names more numbers"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_copy_is_passed_over_with_one_sentence(damage: str, tmp_path: Path) -> None:
    harm, fragment = DAMAGES[damage]
    url = on_mirror(tmp_path, 1, 2)
    harm(tmp_path / "far/step_00000002")
    said: list[str] = []
    fetched = fetch_newest(url, tmp_path / "fresh", said.append)
    assert fetched == tmp_path / "fresh/step_00000001"
    (why,) = [one for one in said if "passed over" in one]
    assert fragment in why and f"{url}/step_00000002" in why and "\n" not in why
    assert [path.name for path in sorted((tmp_path / "fresh").iterdir())] == [LATEST, "step_00000001"]


def test_a_store_that_fails_is_not_an_empty_one(s3: Gate, place: str, tmp_path: Path) -> None:
    """An older checkpoint, or a fresh start, would silently throw away work."""
    for step in (1, 2):
        upload(Store(place), write(tmp_path, step), {})
    s3.faults = [Fault(lambda r: "step_00000002/single" in r.path and r.method == "GET", "error")]
    with pytest.raises(StorageError, match="reduce your request rate"):
        fetch_newest(place, tmp_path / "fresh", lambda _: None, SHORT)
    assert list((tmp_path / "fresh").iterdir()) == []
    s3.faults = [Fault(lambda r: "list-type" in r.path, "error")]
    with pytest.raises(StorageError):
        newest_on_mirror(place, SHORT)
    s3.mend()
    assert fetch_newest(f"{place}/nothing", tmp_path / "fresh", lambda _: None, SHORT) is None


def test_a_download_waits_out_a_short_failure(s3: Gate, place: str, tmp_path: Path) -> None:
    folder = write_large(tmp_path, 1)
    upload(Store(place), folder, {})
    s3.faults = [Fault(lambda r: "single_000" in r.path and r.method == "GET", "drop", 2)]
    fetched = fetch_newest(place, tmp_path / "fresh", lambda _: None, replace(SHORT, attempts=4))
    assert fetched is not None and files_of(fetched) == files_of(folder) and s3.faults[0].times == 0


def test_room_is_looked_for_before_a_download(tmp_path: Path) -> None:
    url = on_mirror(tmp_path, 1)
    folder = tmp_path / "far/step_00000001"
    size = 2 * shutil.disk_usage(tmp_path).total
    with (folder / "single_000.safetensors").open("r+b") as file:
        file.truncate(size)  # takes no room itself
    files = {"single_000.safetensors": FileEntry(size=size, sha256="")}
    rewrite_manifest(folder, files=files)
    with pytest.raises(CheckpointError, match="are free"):
        fetch_newest(url, tmp_path / "fresh", lambda _: None)
    assert list((tmp_path / "fresh").iterdir()) == []


def test_the_runs_own_folder_is_no_mirror(tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    before = files_of(folder)
    with pytest.raises(StorageError, match="the run's own checkpoints"):
        upload(Store(f"file://{tmp_path}"), folder, {})
    assert files_of(folder) == before


def told_by(url: str, folder: Path) -> StorageError:
    with pytest.raises(StorageError) as told:
        upload(Store(url, SHORT), folder, {})
    assert url in str(told.value) and "\n" not in str(told.value) and "a-secret" not in str(told.value)
    return told.value


def test_what_only_somebody_can_mend_is_told_at_once(s3: Gate, place: str, tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    with pytest.raises(StorageError, match="there is no such bucket"):
        newest_on_mirror("s3://no-such-bucket/run", SHORT)
    told = [told_by("s3://no-such-bucket/run", folder)]
    s3.faults = [Fault(lambda r: r.method == "PUT", "error", status=403)]
    told.append(told_by(place, folder))
    s3.seen.clear()
    mirror, reports = mirror_to(place, attempts=5)
    mirror.on_commit(folder)
    until(lambda: reports)
    assert sum(request.method == "PUT" for request in s3.seen) == 1, "it was tried again and again"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AWS_ACCESS_KEY_ID")
        told.append(told_by(place, folder))
    assert all(error.is_lasting for error in told)
    fragments = ("there is no such bucket: create it", "access is denied", "no credentials for it were found")
    assert all(fragment in str(error) for fragment, error in zip(fragments, told, strict=True))


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("s4://bucket/run", "use s3://bucket/folder"),
        ("gs://bucket/run", "pip install 'megalite[gcs]'"),  # not among what the tests need
        ("sftp://host/run", "paramiko"),
        ("s3://a-key:hunter2@bucket/run", "remove them"),
    ],
)
def test_a_url_of_no_use_here_is_refused_before_anything_is_asked(url: str, remedy: str) -> None:
    with pytest.raises(CheckpointError) as told:
        check_url(url)
    assert remedy in str(told.value) and "\n" not in str(told.value) and "hunter2" not in str(told.value)


def test_a_missing_package_of_the_web_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """fsspec names its class, not what to install."""
    missing = ImportError('HTTPFileSystem requires "requests" and "aiohttp" to be installed')
    monkeypatch.setattr("fsspec.get_filesystem_class", Mock(side_effect=missing))
    with pytest.raises(CheckpointError, match=r"not installed: pip install 'megalite\[http\]'"):
        check_url("https://example.com/run")


@pytest.mark.parametrize(
    "text",
    [
        "Could not connect to http://user:hunter2@proxy:3128",
        "GET https://host/key?X-Amz-Credential=hunter2&X-Amz-Signature=hunter2 failed",
        "Credential=hunter2/20260101/us-east-1/s3/aws4_request",
        "{'aws_secret_access_key': 'hunter2', 'token': \"hunter2\"}",
        "<SecretAccessKey>hunter2</SecretAccessKey>",
        "Authorization: Bearer hunter2",
        "password: hunter2",
    ],
)
def test_no_librarys_words_carry_a_credential(text: str) -> None:
    assert "hunter2" not in str(explained("s3://bucket", OSError(f"{text} and\nmore")))
