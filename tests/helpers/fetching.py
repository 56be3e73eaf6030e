"""A process that copies data at URLs to this host. Imports little, so that a fork server starts it at once."""

from __future__ import annotations

import os
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

from launch.trainer.data.remote_data import find_or_fetch_copies
from megalite.config.data import DataConfig


def start_fetch(data: DataConfig, sequence_length: int) -> BaseProcess:
    """A process that makes the copies which `data` needs."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__, "s3fs"])
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    options = data.model_dump(mode="json", exclude_unset=True)
    process = context.Process(target=_fetch, args=(environment, options, sequence_length), daemon=True)
    process.start()
    return process


def _fetch(environment: dict[str, str], options: dict[str, Any], sequence_length: int) -> None:
    os.environ.update(environment)
    find_or_fetch_copies(DataConfig.model_validate(options), sequence_length, may_fetch=True, tell=str)
