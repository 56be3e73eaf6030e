"""A mirror follows the run over real HTTP; whatever the server does, training goes on and the next offer mends it."""

from __future__ import annotations

import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.durable_files import digest
from megalite.checkpoint.errors import StorageError
from megalite.checkpoint.manifest import LATEST, MANIFEST
from megalite.checkpoint.remote import mirror as mirror_module
from megalite.checkpoint.remote.mirror import Mirror
from megalite.checkpoint.remote.storage import Listed, Patience, Store, list_checkpoints
from megalite.checkpoint.remote.transfer import fetch_newest, upload
from megalite.checkpoint.retention import Retention
from tests.helpers.audit import verify_digests
from tests.helpers.mirrors import (
    PART,
    SHORT,
    complete,
    files_of,
    mirror_to,
    pending_uploads,
    rewrite_manifest,
    until,
    write_large,
)
from tests.helpers.s3_server import Fault, Gate
from tests.helpers.single_rank import write_single
from tests.unit.megalite.checkpoint.test_commit import same_size_garbage, write


@pytest.mark.parametrize("kind", ["s3", "file", "memory"])
def test_what_is_mirrored_comes_back_equal(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    urls = {"file": f"file://{tmp_path}/far/away", "memory": "memory://run"}
    url = request.getfixturevalue("place") if kind == "s3" else urls[kind]
    folder = write_large(tmp_path / "near", 7) if kind == "s3" else write(tmp_path / "near", 7)
    mirror, reports = mirror_to(url)
    mirror.on_commit(folder)
    assert mirror.close(60)
    (far,), (near,) = list_checkpoints(url), list_checkpoints(tmp_path / "near")
    assert far == Listed(near.name, f"{url}/{near.name}", near.manifest, None, near.bytes)
    assert [report.event for report in reports] == ["mirrored"] and reports[0].facts["step"] == 7
    assert reports[0].facts["bytes"] == sum(file.size for file in near.manifest.files.values())

    said: list[str] = []
    fetched = fetch_newest(url, tmp_path / "fresh", said.append, SHORT)
    assert fetched == tmp_path / "fresh/step_00000007" and files_of(fetched) == files_of(folder)
    assert (tmp_path / "fresh" / LATEST).read_text() == fetched.name and not list((tmp_path / "fresh").glob(".*"))
    verify_digests(fetched)
    assert len(said) == 1 and url in said[0]

    again, reports = mirror_to(url)
    again.on_commit(folder)
    assert again.close(60) and reports[0].facts["bytes"] == 0, "what is there is not sent again"


def test_an_error_in_mid_upload_is_outlived(s3: Gate, place: str, tmp_path: Path) -> None:
    folder = write_large(tmp_path, 1)
    s3.faults = [Fault(lambda r: PART in r.path, "error", 2), Fault(lambda r: r.path.endswith(MANIFEST), "drop", 1)]
    mirror, reports = mirror_to(place, attempts=10)
    mirror.on_commit(folder)
    assert mirror.close(60)
    assert [report.event for report in reports] == ["mirrored"]
    assert complete(place) == [folder.name] and not pending_uploads()
    assert s3.faults[0].times == 0 and s3.faults[1].times == 0, "the server was not asked to fail"


def test_what_arrives_short_is_sent_again(s3: Gate, place: str, tmp_path: Path) -> None:
    s3.faults = [Fault(lambda r: "single_000" in r.path and r.method == "PUT", "shorten")]
    folder = write(tmp_path, 1)
    with pytest.raises(StorageError, match=r"\d+ bytes arrived of \d+"):
        upload(Store(place, SHORT), folder, {})
    assert complete(place) == []
    s3.faults[0].times = 1
    mirror, _ = mirror_to(place)
    mirror.on_commit(folder)
    assert mirror.close(60) and complete(place) == [folder.name]


def test_a_server_that_fails_for_good_holds_nothing_up(s3: Gate, place: str, tmp_path: Path) -> None:
    first, second, third = (write(tmp_path, step) for step in (1, 2, 3))
    before = files_of(first)
    s3.faults = [Fault(lambda r: r.method != "GET", "error")]
    mirror, reports = mirror_to(place, Retention(keep_last=1, keep_every=2))
    started = time.monotonic()
    mirror.on_commit(first)
    assert time.monotonic() - started < 1, "an offer waits for nothing"
    until(lambda: reports)
    assert reports[0].event == "mirror_failed" and "tried again" in reports[0].sentence
    assert "reduce your request rate" in reports[0].sentence and "\n" not in reports[0].sentence
    assert mirror.pinned() == {first} and files_of(first) == before and complete(place) == []
    mirror.on_commit(second)
    until(lambda: len(reports) == 2)
    assert mirror.pinned() == {second}, "the older one would not stay anyway"
    s3.mend()
    mirror.on_commit(third)
    assert mirror.close(60)
    assert complete(place) == [second.name, third.name], "step 2 is to be kept for good"
    assert [report.event for report in reports].count("mirror_failed") == 2 and not mirror.pinned()


def test_a_newer_one_does_not_wait_for_the_retries_of_an_older_one(s3: Gate, place: str, tmp_path: Path) -> None:
    s3.faults = [Fault(lambda r: r.method == "PUT", "error", 1)]
    mirror, reports = mirror_to(place, Retention(1), patience=replace(SHORT, first_delay_s=120, longest_delay_s=120))
    mirror.on_commit(write(tmp_path, 1))
    until(lambda: s3.faults[0].times == 0)
    mirror.on_commit(write(tmp_path, 2))
    until(lambda: not mirror.pinned())
    assert mirror.close(60) and complete(place) == ["step_00000002"]
    assert [report.facts["step"] for report in reports] == [2], "the older one is no longer worth sending"


@pytest.mark.parametrize(
    ("kind", "patience", "told"),
    [
        ("stall", replace(SHORT, read_s=1), "no answer in time"),
        ("stall before body", replace(SHORT, stall_s=2), "no progress in 2 s"),
    ],
)
def test_a_stalled_server_is_an_error_and_not_a_hang(
    kind: Any, patience: Patience, told: str, s3: Gate, place: str, tmp_path: Path
) -> None:
    """Before the body: the request's bytes stop flowing, which no timeout of botocore's or aiohttp's sees."""
    folder = write_large(tmp_path, 1)
    s3.faults = [Fault(lambda r: PART in r.path, kind)]
    mirror, reports = mirror_to(place, attempts=1, patience=patience)
    mirror.on_commit(folder)
    until(lambda: reports)
    assert reports[0].event == "mirror_failed" and told in reports[0].sentence and complete(place) == []
    assert not pending_uploads(), "a part of a file would be paid for, and nobody sees it"


def test_closing_ends_in_time_and_leaves_nothing_under_way(s3: Gate, place: str, tmp_path: Path) -> None:
    s3.faults = [Fault(lambda r: PART in r.path, "stall")]
    mirror, reports = mirror_to(place, attempts=5, patience=Patience(read_s=60, stall_s=60))
    mirror.on_commit(write_large(tmp_path, 1))
    until(lambda: any(PART in request.path for request in s3.seen))
    started = time.monotonic()
    assert not mirror.close(0.5)
    assert time.monotonic() - started < 10 and not pending_uploads() and complete(place) == []
    assert [report.event for report in reports] == ["mirror_failed"] and "ends without" in reports[0].sentence


def test_the_end_of_a_run_waits_for_a_server_that_comes_back(
    s3: Gate, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The retries of an offer are used up; `close` goes on with them as long as it may, and says so."""
    monkeypatch.setattr(mirror_module, "PROGRESS_EVERY_S", 0.2)
    said: list[str] = []
    s3.faults = [Fault(lambda r: r.method == "PUT", "error")]
    mirror, reports = mirror_to(place, attempts=1)
    mirror.on_commit(write(tmp_path, 1))
    until(lambda: reports)
    threading.Timer(1, s3.mend).start()
    assert mirror.close(60, said.append) and complete(place) == ["step_00000001"]
    assert len(said) >= 2 and said[0] == f"waiting until step_00000001 is on {place} (0.00 GB sent)"


def test_retention_holds_on_the_mirror_and_spares_what_is_not_ours(place: str, tmp_path: Path) -> None:
    store = Store(place)
    (tmp_path / "model.pt").write_bytes(b"another program's")
    store.put(tmp_path / "model.pt", "step_00000001/model.pt")
    mirror, _ = mirror_to(place, Retention(keep_last=2, keep_every=4))
    for step in range(2, 9):
        mirror.on_commit(write(tmp_path, step))
        until(lambda: not mirror.pinned())
    assert mirror.close(60)
    assert complete(place) == ["step_00000004", "step_00000007", "step_00000008"]
    assert store.entries("step_00000001")[0] == {"model.pt": 17} and "step_00000002" not in store.entries()[1]


def test_while_one_is_on_its_way_only_the_newest_and_the_lasting_wait(s3: Gate, place: str, tmp_path: Path) -> None:
    folders = [write(tmp_path, step) for step in range(1, 6)]
    s3.faults = [Fault(lambda r: r.method == "PUT", "stall", 1)]
    mirror = Mirror(place, Retention(keep_last=1, keep_every=2), lambda *_: None, replace(SHORT, read_s=20, stall_s=20))
    mirror.on_commit(folders[0])
    until(lambda: s3.faults[0].times == 0)
    for folder in folders[1:]:
        mirror.on_commit(folder)
    assert mirror.pinned() == {folders[0], folders[1], folders[3], folders[4]}
    s3.mend()
    assert mirror.close(60)
    assert complete(place) == ["step_00000002", "step_00000004", "step_00000005"]


def test_a_step_saved_again_replaces_its_copy(place: str, tmp_path: Path) -> None:
    """As after a rollback; file names of another layout must not stay beside the new ones."""
    mirror, _ = mirror_to(place)
    old = write(tmp_path / "old", 3)
    mirror.on_commit(old)
    until(lambda: not mirror.pinned())
    new = tmp_path / "new/step_00000003"
    write_single(new, [("a.weight", torch.ones(7))], step=3, config={}, tokenizer=None, state={})
    for path in new.glob("*.safetensors"):
        path.rename(new / "rank_00000_000.safetensors")
    rewrite_manifest(new, files={"rank_00000_000.safetensors": digest(new / "rank_00000_000.safetensors")})
    mirror.on_commit(new)
    assert mirror.close(60) and complete(place) == ["step_00000003"]
    fetched = fetch_newest(place, tmp_path / "back", lambda _: None, SHORT)
    assert fetched is not None and files_of(fetched) == files_of(new)
    assert set(Store(place).entries("step_00000003")[0]) == set(files_of(new))


@pytest.mark.parametrize("damage", ["gone", "rotten"])
def test_a_local_checkpoint_that_is_not_sound_is_not_mirrored(damage: str, tmp_path: Path) -> None:
    folder = write(tmp_path, 1)
    if damage == "gone":
        shutil.rmtree(folder)
    else:
        same_size_garbage(folder)
    mirror, reports = mirror_to(f"file://{tmp_path}/far")
    mirror.on_commit(folder)
    assert not mirror.close(60) and not mirror.pinned()
    assert str(folder) in reports[0].sentence and "again" not in reports[0].sentence
    assert complete(f"file://{tmp_path}/far") == []
