"""Copies finished checkpoints to a store in a thread of rank 0 during training.

The store may be slow, failing or gone: no step waits for it and no local checkpoint depends on it. transfer.py defines
what is sent in which order; this module decides when. A mirror belongs to one run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from megalite.checkpoint.errors import CheckpointError, StorageError
from megalite.checkpoint.manifest import FileEntry, read_manifest, step_of
from megalite.checkpoint.remote.errors import scrubbed
from megalite.checkpoint.remote.storage import PATIENCE, Patience, Store
from megalite.checkpoint.remote.transfer import Damaged, prune_store, upload
from megalite.checkpoint.retention import Retention, RetentionCandidate, which_to_delete

CANCEL_S = 5.0  # for what is under way when a mirror is closed
PROGRESS_EVERY_S = 10.0  # while `close` waits


Outcome = Literal["mirrored", "mirror_failed"]
Notify = Callable[[Outcome, str, dict[str, Any]], None]


class Mirror:
    """Keeps the store at `url` up to date with the committed checkpoints. Only `close` waits; any thread may call."""

    def __init__(self, url: str, policy: Retention, notify: Notify, patience: Patience = PATIENCE) -> None:
        """`notify` gets the outcome of each upload, a sentence and facts for events.jsonl, in the uploading thread.

        Raises CheckpointError where `url` cannot be used on this machine; asks no server.
        """
        self._url, self._policy, self._notify, self._patience = url, policy, notify, patience
        self._given_up = threading.Event()
        self._store = self._open()
        self._changed = threading.Condition()  # guards all below
        self._waiting: dict[Path, RetentionCandidate] = {}  # in the order of the offers, and what is on its way
        self._busy: Path | None = None
        self._last: Path | None = None
        self._there: list[RetentionCandidate] = []  # complete ones on the mirror, as last seen
        self._arrived: dict[Path, dict[str, FileEntry]] = {}  # what upload() has sent of unfinished ones
        self._is_awake = self._is_closing = self._is_last_lost = False
        self._thread: threading.Thread | None = None

    def on_commit(self, folder: Path) -> None:
        """Takes a complete checkpoint for upload, and again those whose upload has failed.

        The newest goes first; an older one that waits is dropped unless the policy would keep it forever.
        """
        try:
            candidate = RetentionCandidate.of(folder.name, read_manifest(folder))
        except CheckpointError:  # its upload reports why
            candidate = RetentionCandidate(folder.name, step_of(folder.name))
        with self._changed:
            assert not self._is_closing, "a closed mirror takes nothing"
            self._arrived.pop(folder, None)  # a step may be saved again, with other content
            self._waiting.pop(folder, None)
            self._waiting[folder] = candidate
            self._last, self._is_last_lost = folder, False
            self._drop_superfluous()
            self._is_awake = True
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="mirror", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify_all()

    def pinned(self) -> set[Path]:
        """Returns local folders that must not be deleted yet."""
        with self._changed:
            return set(self._waiting)

    def close(self, timeout_s: float, say: Callable[[str], None] = lambda _: None) -> bool:
        """Waits until all checkpoints are on the mirror, retrying failed uploads; returns whether they are.

        Gives up after `timeout_s`, and immediately for an error that a retry cannot cure. `say` gets the progress.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_closing = self._is_awake = True
            self._changed.notify_all()
        if self._thread is not None:
            while self._thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
                self._thread.join(min(left_s, PROGRESS_EVERY_S))
                if self._thread.is_alive():
                    say(self._progress())
            self._given_up.set()
            with self._changed:
                self._changed.notify_all()
            self._thread.join(CANCEL_S)
        return not self._waiting and not self._is_last_lost

    def _progress(self) -> str:
        with self._changed:
            folder = self._busy or self._last or Path()
            sent = sum(file.size for file in list(self._arrived.get(folder, {}).values()))
        return f"waiting until {folder.name} is on {self._url} ({sent / 1e9:.2f} GB sent)"

    def _work(self) -> None:
        while self._is_awake or not self._is_closing:
            with self._changed:
                self._changed.wait_for(lambda: self._is_awake)
                self._is_awake = False
            try:
                while self._waiting and not self._given_up.is_set() and self._mirror_newest():
                    pass
            except Exception as error:  # a mistake of ours; the thread goes on, the next upload may succeed
                self._report_failure(self._last or Path(), StorageError(scrubbed(repr(error))))

    def _mirror_newest(self) -> bool:
        """Uploads one checkpoint, then applies retention; returns False if the next upload would fail too."""
        with self._changed:
            folder, candidate = next(reversed(self._waiting.items()))
            self._busy = folder
        started = time.monotonic()
        try:
            sent = self._upload(folder)
        except CheckpointError as error:
            self._report_failure(folder, error)
            if isinstance(error, Damaged):
                self._forget(folder, candidate, is_lost=True)
            return isinstance(error, Damaged)
        finally:
            with self._changed:
                self._busy = None
                self._drop_superfluous()
        if sent is not None:
            self._forget(folder, candidate, is_lost=False)
            seconds = time.monotonic() - started
            sentence = f"{folder.name} is on {self._url} ({sent / 1e9:.2f} GB sent in {seconds:.1f} s)"
            self._report("mirrored", sentence, folder, bytes=sent, seconds=round(seconds, 3))
            self._prune(folder)
        return True

    def _upload(self, folder: Path) -> int | None:
        """Uploads with retries; returns the bytes sent, or None if it has failed and a newer checkpoint waits."""
        arrived = self._arrived.setdefault(folder, {})
        attempt = 0
        while True:
            attempt += 1
            try:
                upload(self._store, folder, arrived)
            except StorageError as error:
                self._store = self._open()
                is_last = attempt >= self._patience.attempts and not self._is_closing
                if error.is_lasting or is_last or self._given_up.is_set():
                    raise
            else:
                return sum(file.size for file in arrived.values())
            with self._changed:
                wait_s = self._patience.delay_s(attempt)
                self._changed.wait_for(lambda: self._given_up.is_set() or self._newest() != folder, timeout=wait_s)
                if self._newest() != folder:
                    return None

    def _prune(self, uploaded: Path) -> None:
        protect = {uploaded.name, *(path.name for path in self.pinned())}
        known = [one for one in self._there if one.name != uploaded.name]  # it may be another one under an old name
        try:
            there = prune_store(self._store, self._policy, protect, known)
        except StorageError as error:
            self._store = self._open()
            self._report("mirror_failed", f"old checkpoints stay on the mirror: {error}", uploaded, reason=str(error))
        else:
            with self._changed:
                self._there = there

    def _open(self) -> Store:
        """Opens the store, again after each failure: connections and credentials may have expired."""
        return Store(self._url, self._patience, self._given_up)

    def _newest(self) -> Path:
        return next(reversed(self._waiting))

    def _drop_superfluous(self) -> None:
        """Drops waiting checkpoints that retention would delete, except the newest and the one in progress."""
        if self._policy.keep_last == 0 or not self._waiting:
            return
        keep = {path.name for path in (self._newest(), self._busy) if path is not None}
        lasting = replace(self._policy, keep_last=1)
        dropped = which_to_delete([*self._there, *self._waiting.values()], lasting, keep)
        for path, candidate in list(self._waiting.items()):
            if candidate in dropped:
                del self._waiting[path]

    def _forget(self, folder: Path, candidate: RetentionCandidate, *, is_lost: bool) -> None:
        with self._changed:
            if self._waiting.get(folder) is candidate:  # it has not been saved and offered again meanwhile
                if folder == self._last:
                    self._is_last_lost = is_lost
                del self._waiting[folder]
            self._arrived.pop(folder, None)

    def _report_failure(self, folder: Path, error: Exception) -> None:
        if isinstance(error, Damaged):
            then = ""
        elif self._given_up.is_set() or (self._is_closing and not self._is_awake):
            then = ": the run ends without this copy"
        else:
            then = ": it is tried again after the next checkpoint"
        self._report("mirror_failed", f"mirroring {folder.name} failed: {error}{then}", folder, reason=str(error))

    def _report(self, event: Outcome, sentence: str, folder: Path, **facts: float | str) -> None:
        with suppress(Exception):  # a console or a disk that fails must not end the copies
            self._notify(event, sentence, {"step": step_of(folder.name), "mirror": self._url, **facts})
