"""Writes safetensors files without holding them in memory: a header, then numbers as they come.

`safetensors.torch.save_file` wants the whole file in memory and copies it once more. The format is eight bytes with
the length of a JSON header, the header, and the tensors without gaps (safetensors README, "Format").

Bytes go past the page cache (O_DIRECT), where the file system lets them: filling it would cost more processor time
than hashing and writing together, which the training beside it lacks, and put the data set out of it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.checkpoint.manifest import FileEntry

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
PIECE_BYTES = 8 << 20  # handed at once to the disk and to the digest
PIECES = 3  # of a file in memory: one is filled while others are hashed and written
ALIGNMENT = 4096  # of offsets, lengths and addresses past the page cache, on any disk
Piece = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to be written."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def into_files(entries: Iterable[Entry], most_bytes: int) -> list[list[Entry]]:
    """Groups entries into files, in order; an entry larger than `most_bytes` gets its own file."""
    files: list[list[Entry]] = []
    room = 0
    for entry in entries:
        if not files or entry.size > room:
            files.append([])
            room = most_bytes
        files[-1].append(entry)
        room -= entry.size
    return files


def write_safetensors(
    path: Path, entries: Sequence[Entry], blocks: Callable[[Entry], Iterable[Tensor]], *, is_hashed: bool = True
) -> FileEntry:
    """Writes and syncs a file; returns its size and SHA-256, which a second thread computes if it is wanted.

    `blocks` gives an entry's numbers in row-major order, in tensors of its dtype on any device; a tensor is not used
    after the next one was asked for.
    """
    sha256, size = hashlib.sha256(), 0
    hashed: Callable[[memoryview], None] = sha256.update if is_hashed else lambda piece: None
    pieces = [np.frombuffer(mmap.mmap(-1, PIECE_BYTES, mmap.MAP_PRIVATE), np.uint8) for _ in range(PIECES)]  # aligned
    under_way: deque[tuple[Future[None], Future[None]]] = deque()
    with (
        open(path, "wb", buffering=0, opener=_open_direct) as file,
        ThreadPoolExecutor(1) as hashing,
        ThreadPoolExecutor(1) as writing,
    ):
        descriptor = file.fileno()
        for piece, length in _filled(itertools.cycle(pieces), _chunks(entries, blocks)):
            under_way.append(
                (hashing.submit(hashed, piece[:length].data), writing.submit(_write, descriptor, piece, length, size))
            )
            size += length
            if len(under_way) == PIECES:  # the oldest piece is filled next
                for future in under_way.popleft():
                    future.result()
        for future in itertools.chain.from_iterable(under_way):
            future.result()
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    return FileEntry(size=size, sha256=sha256.hexdigest() if is_hashed else "")


def _chunks(entries: Sequence[Entry], blocks: Callable[[Entry], Iterable[Tensor]]) -> Iterable[memoryview]:
    yield memoryview(_header(entries))
    for entry in entries:
        for block in blocks(entry):
            yield block.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _filled(pieces: Iterator[Piece], chunks: Iterable[memoryview]) -> Iterator[tuple[Piece, int]]:
    """Yields the chunks' bytes in pieces, each with its length; all pieces but the last are full."""
    piece, length = next(pieces), 0
    for chunk in chunks:
        rest = np.frombuffer(chunk, np.uint8)
        while rest.size:
            taken = rest[: PIECE_BYTES - length]
            piece[length : length + taken.size] = taken
            length, rest = length + taken.size, rest[taken.size :]
            if length == PIECE_BYTES:
                yield piece, length
                piece, length = next(pieces), 0
    if length:
        yield piece, length


def _open_direct(path: str, flags: int) -> int:
    """Opens a file with O_DIRECT if the file system supports it; returns its descriptor."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o666)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o666)


def _write(descriptor: int, piece: Piece, length: int, offset: int) -> None:
    """Writes a piece's first `length` bytes and padding up to a multiple of `ALIGNMENT`."""
    rest = piece[: -(-length // ALIGNMENT) * ALIGNMENT].data
    while rest:
        try:
            written = os.pwrite(descriptor, rest, offset)
        except OSError as error:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # another alignment, or a short write before
            continue
        rest, offset = rest[written:], offset + written


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
