"""What the tests of mirrors share: patience for a busy machine, checkpoints, and what a reader finds on a store."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megalite.checkpoint.manifest import MANIFEST, Manifest
from megalite.checkpoint.remote.mirror import Mirror
from megalite.checkpoint.remote.storage import Patience, list_checkpoints
from megalite.checkpoint.retention import Retention
from tests.helpers.s3_fixtures import own_client
from tests.helpers.single_rank import write_single

# long enough for a machine with other work, except for what a test waits for
SHORT = Patience(connect_s=5, read_s=10, requests=1, stall_s=15, attempts=2, first_delay_s=0.1)
KEEP_ALL = Retention(keep_last=0)
PART = "partNumber="  # in the path of a request that carries a part of a large file


def pending_uploads() -> list[str]:
    """Keys of unfinished uploads, which only the provider's own listing shows."""
    return [one["Key"] for one in own_client().list_multipart_uploads("bucket")]


def write_large(root: Path, step: int) -> Path:
    """More than S3 takes in one request of ours: three parts."""
    folder = root / f"step_{step:08d}"
    tensors = [("w", torch.rand(5 << 20))]
    write_single(folder, tensors, step=step, config={}, tokenizer=None, state={})
    return folder


class UploadReport(NamedTuple):
    """What a mirror hands to `notify`."""

    event: str
    sentence: str
    facts: dict[str, Any]


def mirror_to(
    url: str, policy: Retention = KEEP_ALL, attempts: int = 2, patience: Patience = SHORT
) -> tuple[Mirror, list[UploadReport]]:
    reports: list[UploadReport] = []
    notify = lambda *report: reports.append(UploadReport(*report))  # noqa: E731
    return Mirror(url, policy, notify, replace(patience, attempts=attempts)), reports


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.02)


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    """As another writer would have written it, with a digest that holds."""
    manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    (folder / MANIFEST).write_bytes(manifest.model_copy(update=changes).sealed())


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def complete(url: str) -> list[str]:
    """Names of the checkpoints that a reader would take."""
    return [one.name for one in list_checkpoints(url) if one.problem is None]
