"""Checkpoints of one process, without an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from megalite.checkpoint.manifest import WEIGHT, Manifest, entry
from megalite.checkpoint.writer import Block, commit, discard, now, start, write_blocks


def write_single(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    step: int,
    config: dict[str, Any],
    tokenizer: str | None,
    state: dict[str, Any],
) -> None:
    """A weights-only checkpoint from one process: whole tensors by canonical name, stored as fp32.

    Raises CheckpointError where it cannot be written.
    """
    temporary = start(folder)
    shapes: dict[str, tuple[int, ...]] = {}

    def blocks() -> Iterator[Block]:
        for name, tensor in tensors:
            shapes[name] = tuple(tensor.shape)
            whole = tuple(slice(0, n) for n in tensor.shape)
            yield Block(entry(WEIGHT, name, whole), tensor.float())

    try:
        files = write_blocks(temporary, "single", blocks())
        manifest = Manifest(
            step=step, written=now(), config=config, tokenizer=tokenizer, state=state, tensors=shapes, files=files
        )
        commit(folder, manifest)
    finally:
        discard(folder)
