"""Reads a checkpoint: any slice of any global tensor, whichever ranks wrote its blocks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from megalite.checkpoint.durable_files import changed
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.hub_reader import HubReader
from megalite.checkpoint.huggingface.weight_file_reader import SafetensorsFile
from megalite.checkpoint.manifest import (
    WEIGHT,
    Slices,
    find_latest,
    no_checkpoint,
    parse_entry,
    printable,
    read_manifest,
)

log = logging.getLogger(__name__)
ATTEMPTS = 5  # to open the newest checkpoint of a run that removes old ones meanwhile
READERS = min(8, os.cpu_count() or 1)  # files that are hashed concurrently: hashing releases the GIL
MANY_BLOCKS = 1000  # of one tensor, above which they are not compared with one another
Stored = tuple[Slices, str, str]  # block of the global tensor, file, key in the file


class CheckpointReader:
    """A complete checkpoint folder. Raises CheckpointError if it is not one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._files: dict[str, SafetensorsFile] = {}
        self._blocks: dict[tuple[str, str], list[Stored]] = {}
        for name in self.manifest.files:
            self._open(folder / name)
        for (kind, name), blocks in self._blocks.items():
            blocks.sort(key=lambda stored: tuple(s.start for s in stored[0]))
            if (twice := _overlap(blocks)) is not None:
                raise CheckpointError(
                    f"{folder}: {kind} of {printable(name)} is stored twice, in {' and '.join(twice)}"
                )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shape of each tensor, by canonical name."""
        return self.manifest.tensors

    def _open(self, path: Path) -> None:
        file = SafetensorsFile(path)
        try:
            for key, shape in file.shapes.items():
                kind, name, source = parse_entry(key, shape)
                whole = self.manifest.tensors[name]
                if (
                    kind not in self.manifest.kinds_of(name)
                    or file.tags[key] != "F32"
                    or len(whole) != len(source)
                    or any(s.stop > n for s, n in zip(source, whole, strict=True))
                ):
                    raise ValueError(key)
                self._blocks.setdefault((kind, name), []).append((source, path.name, key))
        except (ValueError, KeyError) as error:
            what = printable(str(error))
            raise CheckpointError(f"{path}: holds what its manifest does not know: {what}") from None
        self._files[path.name] = file

    def read(self, name: str, source: Slices | None = None, kind: str = WEIGHT) -> Tensor:
        """Reads a slice (default: all) of tensor `name` in fp32; `kind` is one of `manifest.kinds_of(name)`."""
        shape = self._shape(name)
        wanted = source or tuple(slice(0, n) for n in shape)
        result = torch.empty([s.stop - s.start for s in wanted], dtype=torch.float32)
        self.fill(result, name, wanted, kind)
        return result

    def fill(self, target: Tensor, name: str, source: Slices, kind: str = WEIGHT) -> None:
        """Reads a slice into a tensor of its shape, on any device."""
        self._shape(name)
        missing = target.numel()
        for bounds, file, key in self._blocks.get((kind, name), []):
            common = [slice(max(w.start, b.start), min(w.stop, b.stop)) for w, b in zip(source, bounds, strict=True)]
            if any(c.start >= c.stop for c in common):
                continue
            inside = tuple(slice(c.start - b.start, c.stop - b.start) for c, b in zip(common, bounds, strict=True))
            place = tuple(slice(c.start - w.start, c.stop - w.start) for c, w in zip(common, source, strict=True))
            block = self._files[file].read(key, inside)
            target[place].copy_(block)
            missing -= block.numel()
        if missing:
            raise CheckpointError(f"{self.folder}: {kind} of {name} is not whole: {missing} numbers are missing")

    def view(self, name: str, source: Slices) -> Tensor | None:
        """Returns a slice of the weight `name` as a view of the mapped file, or None if no single block holds it."""
        for bounds, file, key in self._blocks.get((WEIGHT, name), []):
            if all(b.start <= w.start and w.stop <= b.stop for w, b in zip(source, bounds, strict=True)):
                inside = tuple(slice(w.start - b.start, w.stop - b.start) for w, b in zip(source, bounds, strict=True))
                return self._files[file].read(key, inside)
        return None

    def verify_weights(self, report: Callable[[int, int], object]) -> None:
        """Reads all files that hold weights and compares their digests. Raises CheckpointError if one differs.

        `report` is called after each file with the bytes that have been read, and of how many.
        """
        names = {file for (kind, _), blocks in self._blocks.items() if kind == WEIGHT for _, file, _ in blocks}
        files = {name: self._files[name] for name in sorted(names)}
        done, total = 0, sum(self.manifest.files[name].size for name in names)
        with ThreadPoolExecutor(READERS) as pool:
            for name, sha256 in zip(files, pool.map(SafetensorsFile.sha256, files.values()), strict=True):
                if sha256 != self.manifest.files[name].sha256:
                    raise changed(self.folder / name)
                done += self.manifest.files[name].size
                report(done, total)

    def stored_numbers(self) -> dict[tuple[str, str], int]:
        """Returns how many numbers of each tensor the files hold, by kind and name."""
        return {
            key: sum(prod(s.stop - s.start for s in source) for source, *_ in blocks)
            for key, blocks in self._blocks.items()
        }

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder}: holds no tensor {name}: it is of another model")
        return self.manifest.tensors[name]


Reader = TypeVar("Reader", bound=CheckpointReader)
WeightReader = CheckpointReader | HubReader  # a source of weights, as `load_engine` takes it


def _overlap(blocks: list[Stored]) -> tuple[str, str] | None:
    """Returns the files of two overlapping blocks, if any; `blocks` are sorted by their corners."""
    if len(blocks) > MANY_BLOCKS:
        return _overlap_on_a_grid(blocks)
    for number, (block, file, _) in enumerate(blocks):
        for other, other_file, _ in blocks[number + 1 :]:
            if other[0].start >= block[0].stop:
                break
            if all(a.start < b.stop and b.start < a.stop for a, b in zip(block, other, strict=True)):
                return file, other_file
    return None


def _overlap_on_a_grid(blocks: list[Stored]) -> tuple[str, str] | None:
    """Finds an overlap in time linear in the blocks' numbers, however many blocks there are."""
    taken = np.zeros([max(block[axis].stop for block, *_ in blocks) for axis in range(len(blocks[0][0]))], dtype=bool)
    for block, file, _ in blocks:
        if taken[block].any():
            return file, "another file"
        taken[block] = True
    return None


def open_checkpoint(path: Path, kind: Callable[[Path], Reader] = CheckpointReader) -> Reader:  # type: ignore[assignment]
    """Opens the checkpoint at `path`, or the newest complete one under it, even while a run removes old ones.

    Warns of newer checkpoints that it passes over. The files of an open checkpoint are mapped, so it stays readable
    when they are removed. Raises CheckpointError.
    """
    folder = None
    for _ in range(ATTEMPTS):
        folder, skipped = find_latest(path)
        if folder is None:
            raise CheckpointError(skipped[0] if skipped else no_checkpoint(path))
        try:
            reader = kind(folder)
        except CheckpointError:
            if folder.is_dir():
                raise
        else:
            for reason in skipped:
                log.warning(f"{reason}: taking {folder} instead")
            return reader
    raise CheckpointError(
        f"{folder}: was removed while it was being opened, its run keeps only some (checkpoint.keep_last): give the "
        "run's folder, of which the newest is taken"
    )
