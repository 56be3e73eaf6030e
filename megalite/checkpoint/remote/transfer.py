"""Uploads, deletes and downloads checkpoints of a mirror.

An upload marks its folder, sends the files, compares their sizes, sends the manifest last and removes the mark. A
deletion marks the folder, removes the manifest first and the mark last. So a checkpoint is complete exactly while its
manifest exists, whenever a process is killed, and only folders with the mark are cleaned up: others may be foreign.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from megalite.checkpoint.durable_files import verify_digest, write_durably
from megalite.checkpoint.errors import CheckpointError, StorageError
from megalite.checkpoint.manifest import MANIFEST, FileEntry, read_manifest, step_names
from megalite.checkpoint.remote.storage import PATIENCE, Listed, Patience, Store, inspect_checkpoint, join
from megalite.checkpoint.retention import Retention, RetentionCandidate, which_to_delete

MARK = "incomplete"  # name of the file that marks a folder as ours and unfinished
PROGRESS_INTERVAL_S = 30.0

Result = TypeVar("Result")


class Damaged(CheckpointError):
    """Raised for a checkpoint whose content has changed: another one must be used."""


def upload(store: Store, folder: Path, arrived: dict[str, FileEntry]) -> None:
    """Makes the folder of that name on the store equal to the complete local `folder`.

    `arrived`: the files that have been sent, to be handed in again after a failure. Raises StorageError, or Damaged
    where it is the local folder that has changed or gone.
    """
    name = folder.name
    if store.local_root is not None and (store.local_root / name).resolve() == folder.resolve():
        raise StorageError(f"{store.url} is the folder of the run's own checkpoints: choose another", is_lasting=True)
    try:
        data = (folder / MANIFEST).read_bytes()
        manifest = read_manifest(folder)
    except (CheckpointError, OSError) as error:
        raise Damaged(f"{folder}: not copied: {error}") from None
    files, _ = store.entries(name)
    has_all = MANIFEST in files and all(files.get(file) == recorded.size for file, recorded in manifest.files.items())
    if has_all and store.read(join(name, MANIFEST)) == data:
        store.remove([join(name, MARK)] if MARK in files else [])
        return
    with suppress(StorageError):  # it may be forbidden where uploads are allowed
        store.abort_uploads("step_")  # of a killed process: a mirror has one run
    _mark(store, name)
    store.remove([join(name, MANIFEST)] if MANIFEST in files else [])
    store.remove(join(name, other) for other in set(files) - set(manifest.files) - {MANIFEST, MARK})
    for file, recorded in manifest.files.items():
        if arrived.get(file) == recorded and files.get(file) == recorded.size:
            continue
        try:
            verify_digest(folder / file, recorded)
        except (CheckpointError, OSError) as error:
            raise Damaged(f"{folder}: not copied: {error}") from None
        store.put(folder / file, join(name, file))
        arrived[file] = recorded
    _send_manifest(store, folder, data)
    store.remove([join(name, MARK)])


def _mark(store: Store, name: str) -> None:
    with tempfile.NamedTemporaryFile() as empty:
        store.put(Path(empty.name), join(name, MARK))


def _send_manifest(store: Store, folder: Path, data: bytes) -> None:
    """Commits the upload. `data` is the manifest that was compared; the folder may have been replaced since."""
    place = join(folder.name, MANIFEST)
    try:
        store.put(folder / MANIFEST, place)
    except OSError as error:
        raise Damaged(f"{folder}: not copied: {error}") from None
    if store.read(place) != data:
        store.remove([place])
        raise Damaged(f"{folder}: not copied: it was replaced meanwhile")


def prune_store(
    store: Store, policy: Retention, protect: Collection[str], known: Collection[RetentionCandidate] = ()
) -> list[RetentionCandidate]:
    """Deletes complete checkpoints that no reason keeps and marked leftovers; returns the complete ones that remain.

    Never touches names in `protect`, and does not ask about `known` ones again. Raises StorageError.
    """
    complete = {one.name: one for one in known}
    names = step_names(store.entries()[1])
    for name in names:
        if name in complete:
            continue
        listed = inspect_checkpoint(store, name)
        if listed.manifest is not None:
            complete[name] = RetentionCandidate.of(name, listed.manifest)
        elif name not in protect:
            files, _ = store.entries(name)
            if MARK in files and MANIFEST not in files:
                _delete(store, name, files)
    there = [complete[name] for name in names if name in complete]
    deleted = which_to_delete(there, policy, protect)
    for one in deleted:
        _mark(store, one.name)
        _delete(store, one.name, store.entries(one.name)[0])
    return [one for one in there if one not in deleted]


def _delete(store: Store, name: str, files: Collection[str]) -> None:
    store.remove([join(name, MANIFEST)] if MANIFEST in files else [])
    store.remove(join(name, file) for file in files if file not in (MANIFEST, MARK))
    store.remove([name], recursive=True)


def newest_on_mirror(url: str, patience: Patience = PATIENCE) -> Listed | None:
    """Returns the newest checkpoint at `url` with valid manifest and sizes; None if there is none.

    Raises StorageError where the store does not answer: that is not the same as none.
    """
    newest_first = _newest_first(Store(url, patience), patience)
    return next((listed for listed in newest_first if listed.manifest is not None), None)


def fetch_newest(
    url: str,
    root: Path,
    progress: Callable[[str], None],
    patience: Patience = PATIENCE,
    warn: Callable[[str], None] | None = None,
) -> Path | None:
    """Downloads the newest valid checkpoint at `url` into `root`; returns None if there is none.

    `progress` gets sentences about how the download goes, and `warn`, by default the same function, one for each
    checkpoint that is passed over. Raises StorageError where the
    store fails, and CheckpointError where `root` cannot take it: an older checkpoint would be no answer to either.
    """
    store = Store(url, patience)
    for listed in _newest_first(store, patience):
        try:
            return _fetch(store, listed, root, progress, patience)
        except Damaged as error:
            (warn or progress)(f"passed over: {error}")
    return None


def _newest_first(store: Store, patience: Patience) -> Iterator[Listed]:
    for name in reversed(with_retries(patience, lambda: step_names(store.entries()[1]))):
        yield with_retries(patience, partial(inspect_checkpoint, store, name))


def _fetch(store: Store, listed: Listed, root: Path, progress: Callable[[str], None], patience: Patience) -> Path:
    """Downloads a checkpoint into `root`, verifies all digests and commits it; returns its folder.

    Raises Damaged, StorageError, or CheckpointError where it cannot be written.
    """
    from megalite.checkpoint.writer import check_room, commit, discard, start  # brings torch along

    if listed.manifest is None:
        raise Damaged(str(listed.problem))
    folder = root / listed.name
    temporary = start(folder)
    try:
        check_room(root, listed.bytes)
        progress(f"fetching {listed.url} ({listed.bytes / 1e9:.2f} GB)")
        done, reported = 0, time.monotonic()
        for file, recorded in listed.manifest.files.items():
            with_retries(patience, partial(store.get, join(listed.name, file), temporary / file))
            try:
                verify_digest(temporary / file, recorded)
            except CheckpointError:
                raise Damaged(f"{listed.url}: {file} is not what was written: its digest differs") from None
            done += recorded.size
            if time.monotonic() - reported > PROGRESS_INTERVAL_S:
                reported = time.monotonic()
                progress(f"fetching {listed.url}: {done / 1e9:.2f} of {listed.bytes / 1e9:.2f} GB")
        write_durably(temporary / MANIFEST, listed.manifest.sealed())
        try:
            read_manifest(temporary)
        except CheckpointError as error:
            raise Damaged(str(error).replace(str(temporary), listed.url)) from None
        commit(folder, listed.manifest)
    finally:
        discard(folder)
    return folder


def with_retries(patience: Patience, action: Callable[[], Result]) -> Result:
    """Retries `action` with growing delays while the store's failures are temporary."""
    attempt = 1
    while True:
        try:
            return action()
        except StorageError as error:
            if error.is_lasting or attempt >= patience.attempts:
                raise
        time.sleep(patience.delay_s(attempt))
        attempt += 1
