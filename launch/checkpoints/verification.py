"""Verifies checkpoints: manifest, sizes, headers, and that every number of every tensor is stored exactly once.

A `deep` verification reads every byte: it checks the digest of each file, and that all numbers are finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megalite.checkpoint.durable_files import verify_digest
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.folder import row_blocks
from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.checkpoint.reader import READERS, CheckpointReader

Advance = Callable[[int], None]  # called with the number of bytes that have just been read


@dataclass(frozen=True)
class Verification:
    """The result of verifying one checkpoint."""

    folder: Path
    step: int | None  # None where the manifest cannot be read
    tensors: int
    size: int  # bytes of its files
    problems: tuple[str, ...]  # a sentence each

    @property
    def passed(self) -> bool:
        return not self.problems


def bytes_to_read(folder: Path) -> int:
    """Returns the bytes that a deep verification reads: every file twice."""
    try:
        return 2 * sum(file.size for file in read_manifest(folder).files.values())
    except CheckpointError:
        return 0


def verify_checkpoint(folder: Path, *, deep: bool, advance: Advance = lambda size: None) -> Verification:
    """Collects all problems of the checkpoint in `folder`; never raises because of its contents."""
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        return Verification(folder, None, 0, 0, (str(error),))
    problems = list(_changed_files(folder, manifest, advance)) if deep else []
    try:
        problems += _damaged_tensors(CheckpointReader(folder), advance, deep=deep)
    except CheckpointError as error:
        problems.append(str(error))
    size = sum(file.size for file in manifest.files.values())
    return Verification(folder, manifest.step, len(manifest.tensors), size, tuple(problems))


def _changed_files(folder: Path, manifest: Manifest, advance: Advance) -> Iterator[str]:
    with ThreadPoolExecutor(READERS) as pool:
        sizes = {pool.submit(verify_digest, folder / name, file): file.size for name, file in manifest.files.items()}
        for done in as_completed(sizes):
            advance(sizes[done])
            try:
                done.result()
            except CheckpointError as error:
                yield str(error)
            except OSError as error:
                yield f"{error.filename}: cannot be read: {error.strerror}"


def _damaged_tensors(reader: CheckpointReader, advance: Advance, *, deep: bool) -> Iterator[str]:
    """Yields a sentence per tensor with numbers that are missing or, if `deep`, not finite.

    The reader has checked that no number is stored twice, outside its tensor or for a tensor unknown to the manifest.
    """
    stored = reader.stored_numbers()
    for name, shape in reader.manifest.tensors.items():
        for kind in reader.manifest.kinds_of(name):
            whole, nonfinite = prod(shape), 0
            if missing := whole - stored.pop((kind, name), 0):
                yield f"{reader.folder}: {kind} of {name} is not whole: {missing} of its {whole} numbers are missing"
            for block in row_blocks(shape, 4) if deep else ():
                with suppress(CheckpointError):  # a block with missing numbers
                    numbers = reader.read(name, block, kind)
                    nonfinite += numbers.numel() - int(numbers.isfinite().sum())
                    advance(numbers.nbytes)
            if nonfinite:
                yield f"{reader.folder}: {kind} of {name} has {nonfinite} numbers that are not finite (NaN or infinity)"
