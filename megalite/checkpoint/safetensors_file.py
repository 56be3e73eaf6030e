"""Writing safetensors files without holding them in memory: a header, then numbers as they come.

`safetensors.torch.save_file` wants the whole file in memory and copies it once more. The format is eight bytes with
the length of a JSON header, the header, and the tensors without gaps (safetensors README, "Format").
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.manifest import FileEntry

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
CHUNK_BYTES = 32 << 20  # handed at once to the disk and to the digest


@dataclass(frozen=True)
class Entry:
    """One tensor of a file that is about to be written."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_safetensors(path: Path, entries: Sequence[Entry], blocks: Callable[[Entry], Iterable[Tensor]]) -> FileEntry:
    """Writes and syncs a file; returns its size and SHA-256, which is computed beside the writing.

    `blocks` gives an entry's numbers in row-major order, in tensors of its dtype on any device; they must not change
    until this returns.
    """
    sha256 = hashlib.sha256()
    with ThreadPoolExecutor(1) as hashing, path.open("wb") as file:
        pending: Future[None] | None = None
        for chunk in _chunks(entries, blocks):
            before, pending = pending, hashing.submit(sha256.update, chunk)
            file.write(chunk)
            if before is not None:
                before.result()
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size=path.stat().st_size, sha256=sha256.hexdigest())


def _chunks(entries: Sequence[Entry], blocks: Callable[[Entry], Iterable[Tensor]]) -> Iterable[memoryview]:
    yield memoryview(_header(entries))
    for entry in entries:
        for block in blocks(entry):
            numbers = block.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
            for start in range(0, len(numbers), CHUNK_BYTES):
                yield numbers[start : start + CHUNK_BYTES]


def _header(entries: Sequence[Entry]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        place = [offset, offset + entry.size]
        header[entry.key] = {"dtype": TAGS[entry.dtype], "shape": list(entry.shape), "data_offsets": place}
        offset += entry.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # numbers start aligned
    return len(text).to_bytes(8, "little") + text
