"""Storage of checkpoints: a local folder or any fsspec URL (`s3://bucket/run`, `file:///mnt/run`), listed alike.

A `Store` is one such URL. fsspec and its libraries transfer in parts and concurrently; this module adds that every call
ends: requests have timeouts, and a transfer without progress is cancelled, so that a stalled server causes a
StorageError and never a hang. Messages contain no credentials, whatever a library's error contains.

Guarantees for the upload of one file: on an object store (s3, gs, az) the object appears complete or not at all; for
`file:` a temporary name is synced and renamed. Other protocols guarantee nothing: the manifest, which is sent last,
and the sizes that it lists distinguish a complete checkpoint from a part of one.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from megalite.checkpoint.durable_files import sync
from megalite.checkpoint.errors import CheckpointError, StorageError
from megalite.checkpoint.manifest import (
    MANIFEST,
    MANIFEST_BYTES,
    STEP,
    Manifest,
    check_size,
    parse_manifest,
    read_manifest,
    step_names,
    step_of,
)
from megalite.checkpoint.remote.errors import error_code, explained
from megalite.config.store_url import problem_with_url

PART_BYTES = 8 << 20  # of one file, sent or fetched in one request
PARTS_AT_ONCE = 4  # together 32 MB of host memory
MOST_PARTS = 9_000  # S3 takes 10,000
POLL_S = 0.2
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}  # protocol -> what `pip install megalite[...]` takes


@dataclass(frozen=True)
class Listed:
    """One checkpoint folder, complete or not."""

    name: str  # step_00000010
    url: str  # of the folder; a plain path for a local folder
    manifest: Manifest | None  # None where it is not a complete checkpoint
    problem: str | None  # one sentence: why it is not a complete checkpoint; None for a complete one
    bytes: int  # of its files as they lie there

    @property
    def step(self) -> int | None:
        """The step by the manifest, or else by the name; None if neither has one."""
        if self.manifest is not None:
            return self.manifest.step
        return step_of(self.name) if STEP.fullmatch(self.name) else None


@dataclass(frozen=True)
class Patience:
    """Timeouts and retries of requests to a store."""

    connect_s: float = 10
    read_s: float = 30  # for the next bytes of an answer
    requests: int = 3  # times one request is sent before it has failed
    stall_s: float = 120  # without any progress of a call or a transfer
    attempts: int = 5  # of a transfer
    first_delay_s: float = 2  # after a failed attempt; doubles each time
    longest_delay_s: float = 60

    def delay_s(self, attempt: int) -> float:
        """Returns the delay after the `attempt`-th failure, counted from 1."""
        return min(self.first_delay_s * 2.0 ** (attempt - 1), self.longest_delay_s)


PATIENCE = Patience()


def check_url(url: str) -> None:
    """Checks that `url` can hold checkpoints and that its library is installed. Contacts no server.

    Raises CheckpointError.
    """
    import fsspec

    problem = problem_with_url(url)
    if problem is not None:
        raise CheckpointError(f"the URL of a place on a store {problem}")
    protocol = urlsplit(url).scheme
    if protocol not in fsspec.available_protocols():
        raise CheckpointError(
            f"{url}: fsspec knows no protocol {protocol}: use s3://bucket/folder, gs://bucket/folder or file:///folder"
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        package = "megalite[http]" if protocol in ("http", "https") else f"megalite[{extra}]"
        remedy = f"pip install '{package}'" if extra or protocol.startswith("http") else error
        raise CheckpointError(f"{url}: {protocol}: needs a package that is not installed: {remedy}") from None


def join(folder: str, name: str) -> str:
    """Joins two paths, either of which may be empty."""
    return f"{folder}/{name}" if folder and name else folder or name


class Store:
    """The folder that a URL names. Names are relative to it: "step_00000010/manifest.json".

    Every method raises StorageError, one sentence. `given_up`, once set, ends a transfer within a second.
    """

    def __init__(self, url: str, patience: Patience = PATIENCE, given_up: threading.Event | None = None) -> None:
        check_url(url)
        from fsspec.callbacks import Callback
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        self._patience, self._given_up = patience, given_up or threading.Event()
        self._extra = EXTRAS.get(urlsplit(url).scheme)
        options: dict[str, Any] = {}  # our timeouts under the names of the protocol's own library
        if self._extra == "s3":
            retries = {"total_max_attempts": patience.requests, "mode": "standard"}
            timeouts = {"connect_timeout": patience.connect_s, "read_timeout": patience.read_s}
            parts = {"default_block_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
            options = {"config_kwargs": timeouts | {"retries": retries}, "use_listings_cache": False, **parts}
        elif self._extra == "gcs":
            options = {"requests_timeout": patience.stall_s, "use_listings_cache": False}
        try:
            self._fs, root = url_to_fs(self.url, skip_instance_cache=True, **options)
        except Exception as error:  # each library has its own
            raise explained(self.url, error) from None
        if self._extra == "s3":
            self._fs.retries = 1  # botocore's are enough: s3fs would repeat each of them
        self._root = root.rstrip("/")
        self._progress_time = 0.0  # time.monotonic() of the last progress
        self._callback = Callback(hooks={"progress": lambda *_, **__: self._note_progress()})

    @property
    def local_root(self) -> Path | None:
        """The folder itself if the store is a file system of this machine, else None."""
        return Path(self._root) if getattr(self._fs, "local_file", False) else None

    def entries(self, name: str = "") -> tuple[dict[str, int], list[str]]:
        """Lists files (with sizes in bytes) and folders directly in a folder; both empty if it does not exist."""
        path = self._path(name)
        try:
            listed = self._call("ls", path, detail=True)
        except FileNotFoundError:
            return {}, []
        files, folders = {}, []
        for item in listed:
            if item["name"].strip("/") == path.strip("/"):
                continue  # an object that stands for the folder itself
            base = PurePosixPath(item["name"]).name
            if item["type"] == "directory":
                folders.append(base)
            else:
                files[base] = int(item["size"])
        return files, sorted(folders)

    def read(self, name: str) -> bytes | None:
        """Reads a small file; returns None if it does not exist."""
        try:
            return self._call("cat_file", self._path(name))
        except FileNotFoundError:
            return None

    def size_of(self, name: str) -> int | None:
        """Returns the size of a file in bytes; None if it does not exist."""
        try:
            info = self._call("info", self._path(name))
        except FileNotFoundError:
            return None
        if info["type"] != "file" or info.get("size") is None:
            raise StorageError(f"{self.url_of(name)} is no file of a known size", is_lasting=True)
        return int(info["size"])

    def read_part(self, name: str, first: int, stop: int) -> bytes:
        """Reads the bytes [first, stop) of a file, several parts at once."""
        firsts = range(first, stop, PART_BYTES)
        stops = [min(one + PART_BYTES, stop) for one in firsts]
        paths = [self._path(name)] * len(stops)
        try:
            content = b"".join(self._call("cat_ranges", paths, list(firsts), stops, on_error="raise"))
        except FileNotFoundError:
            raise StorageError(f"{self.url_of(name)} is gone", is_lasting=True) from None
        if len(content) != stop - first:
            raise StorageError(f"{self.url_of(name)}: {len(content)} bytes arrived of {stop - first}")
        return content

    def put(self, local: Path, name: str) -> None:
        """Uploads a file and compares the size that arrived; S3 also compares the CRC that botocore sends."""
        path, expected = self._path(name), local.stat().st_size
        parts = {"chunksize": max(PART_BYTES, -(-expected // MOST_PARTS))} if self._extra else {}
        try:
            if self.local_root is None:
                self._call("put_file", str(local), path, callback=self._callback, **parts)
            else:
                _copy_durably(local, Path(path))
            arrived = self._call("info", path)["size"]
        except OSError as error:
            raise explained(self.url_of(name), error) from None
        except StorageError:
            with suppress(StorageError):  # s3fs leaves one behind where it was given up or could not end it
                self.abort_uploads(name)
            raise
        if arrived != expected:
            raise StorageError(f"{self.url_of(name)}: {arrived} bytes arrived of {expected}")

    def get(self, name: str, local: Path) -> None:
        """Downloads a file to `local` and syncs it."""
        try:
            self._call("get_file", self._path(name), str(local), callback=self._callback)
            sync(local)
        except OSError as error:
            raise explained(self.url_of(name), error) from None

    def remove(self, names: Iterable[str], *, recursive: bool = False) -> None:
        """Removes files that exist, and folders with their contents if `recursive`."""
        paths = [self._path(name) for name in names]
        if paths:
            with suppress(FileNotFoundError):
                self._call("rm", paths, recursive=recursive)

    def abort_uploads(self, prefix: str) -> None:
        """Aborts multipart uploads of names that begin with `prefix`, which nothing will complete.

        No listing shows them, but S3 charges for them. Other stores drop theirs by themselves.
        """
        if self._extra != "s3":
            return
        bucket, key, _ = self._fs.split_path(self._path(prefix))
        for upload in self._call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=key).get("Uploads", []):
            with suppress(FileNotFoundError):  # it has ended meanwhile
                self._call(
                    "call_s3", "abort_multipart_upload", Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )

    def url_of(self, name: str) -> str:
        """Returns the URL of a file or folder."""
        return join(self.url, name)

    def _path(self, name: str) -> str:
        return join(self._root, name)

    def _note_progress(self) -> None:
        self._progress_time = time.monotonic()

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Calls a method of the filesystem. Raises FileNotFoundError, or StorageError for any other error."""
        self._fs.invalidate_cache()
        try:
            if not getattr(self._fs, "async_impl", False):
                return getattr(self._fs, method)(*arguments, **options)
            from fsspec.asyn import sync as wait_for

            return wait_for(self._fs.loop, self._watched, f"_{method}", *arguments, **options)
        except StorageError:
            raise
        except Exception as error:  # each library has its own
            if isinstance(error, FileNotFoundError) and error_code(error) != "NoSuchBucket":
                raise
            raise explained(self.url, error) from None

    async def _watched(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Awaits a coroutine of the filesystem as long as it makes progress, else cancels it and raises StorageError.

        aiohttp's timeouts begin once a request has been sent: they do not see a server that stops taking it.
        """
        self._note_progress()
        is_transfer = method in ("_put_file", "_get_file")
        task = asyncio.ensure_future(getattr(self._fs, method)(*arguments, **options))
        while not (await asyncio.wait({task}, timeout=POLL_S))[0]:
            has_stalled = time.monotonic() - self._progress_time > self._patience.stall_s
            if has_stalled or (is_transfer and self._given_up.is_set()):
                task.cancel()
                await asyncio.wait({task}, timeout=POLL_S)
                why = f"no progress in {self._patience.stall_s:g} s" if has_stalled else "given up"
                raise StorageError(f"{self.url}: {why}")
        return task.result()


def _copy_durably(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.copyfile(source, temporary)
    sync(temporary)
    temporary.replace(target)
    sync(target.parent)


def list_checkpoints(where: str | Path) -> list[Listed]:
    """Lists all checkpoint folders, complete or not, by step, of a URL or of a local folder as `find_latest` takes it.

    `where` may be a folder of checkpoints, a run's folder, or a checkpoint itself; where there is nothing, the list is
    empty. Raises StorageError where the store does not answer.
    """
    if isinstance(where, Path) or "://" not in where:
        root = Path(where)
        if (root / "checkpoints").is_dir():
            root = root / "checkpoints"
        names = step_names(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
        folders = [root / name for name in names] or ([root] if (root / MANIFEST).is_file() else [])
        return [_inspect_folder(folder) for folder in folders]
    store = Store(where)
    files, children = store.entries()
    if "checkpoints" in children:
        store = Store(f"{store.url}/checkpoints")
        files, children = store.entries()
    names = step_names(children) or ([""] if MANIFEST in files else [])
    return [inspect_checkpoint(store, name) for name in names]


def _inspect_folder(folder: Path) -> Listed:
    manifest = problem = None
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        problem = str(error)
    size = 0
    with suppress(OSError):  # then `problem` has the reason
        size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    return Listed(folder.name, str(folder), manifest, problem, size)


def inspect_checkpoint(store: Store, name: str) -> Listed:
    """Reads the manifest of checkpoint `name` on a store, and compares the sizes of the files that it lists.

    Raises StorageError.
    """
    files, _ = store.entries(name)
    url = store.url_of(name)
    data = store.read(join(name, MANIFEST)) if files.get(MANIFEST, 0) <= MANIFEST_BYTES else b""
    manifest = problem = None
    try:
        if data is None:
            raise CheckpointError(f"{url}: not a complete checkpoint: it has no {MANIFEST}, its upload was interrupted")
        manifest = parse_manifest(data, f"{url}/{MANIFEST}")
        for file, recorded in manifest.files.items():
            check_size(url, file, recorded, files.get(file))
    except CheckpointError as error:
        manifest, problem = None, str(error)
    return Listed(PurePosixPath(url).name, url, manifest, problem, sum(files.values()))
