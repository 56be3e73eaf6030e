"""What a process does that is killed in the middle of it. Imports little, so that a fork server starts it at once."""

from __future__ import annotations

import os
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from megalite.checkpoint.remote.storage import Patience, Store
from megalite.checkpoint.remote.transfer import prune_store, upload
from megalite.checkpoint.retention import Retention


def start_upload(url: str, folder: Path) -> BaseProcess:
    """A process that uploads `folder`."""
    return _start(_upload, url, str(folder))


def start_prune(url: str) -> BaseProcess:
    """A process that deletes all but the newest checkpoint."""
    return _start(_prune, url)


def _start(target: object, *arguments: str) -> BaseProcess:
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "s3fs"])
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    process = context.Process(target=target, args=(environment, *arguments), daemon=True)  # type: ignore[arg-type]
    process.start()
    return process


def _upload(environment: dict[str, str], url: str, folder: str) -> None:
    os.environ.update(environment)
    upload(Store(url, Patience(stall_s=60)), Path(folder), {})


def _prune(environment: dict[str, str], url: str) -> None:
    os.environ.update(environment)
    prune_store(Store(url, Patience(stall_s=60)), Retention(1), set())
