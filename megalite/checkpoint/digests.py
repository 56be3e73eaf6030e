"""Comparing a checkpoint with the digests of its manifest, shared among all ranks."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.files import verify_digest
from megalite.checkpoint.manifest import Manifest


def check_digests_together(folder: Path, manifest: Manifest) -> None:
    """Each rank reads its share of the files. Raises CheckpointError on all ranks where one file has changed."""
    failure: str | None = None
    try:
        for name in sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]:
            verify_digest(folder / name, manifest.files[name])
    except (CheckpointError, OSError) as error:
        failure = str(error)
    failures: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(failures, failure)
    for found in failures:
        if found is not None:
            raise CheckpointError(found)
