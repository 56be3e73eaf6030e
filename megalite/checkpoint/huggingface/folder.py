"""Reads and writes the files of Hugging Face folders: `config.json`, weights with or without an index.

Reading: any slice of any tensor, after every tensor has been accounted for. Writing: weights streamed in blocks of
rows into safetensors files of limited size. Names of tensors come in as plain dicts in the hub's spelling: which family
spells how is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.json_files import CONFIG, read_json
from megalite.checkpoint.huggingface.safetensors_writer import DTYPES, Entry, into_files, write_safetensors
from megalite.checkpoint.huggingface.weight_file_reader import PickleFile, SafetensorsFile, Shape, WeightFile
from megalite.checkpoint.manifest import Slices, printable

GENERATION_CONFIG = "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SHARD_BYTES = 2 * 10**9  # as transformers reads anywhere, and small enough to fetch again
BLOCK_BYTES = 16 << 20  # of a tensor in memory at once; malloc keeps as much for the next block, more it maps anew


class HuggingFaceFolder:
    """The weights and config of one folder. Raises CheckpointError if they cannot be read."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            why = "is a file, not a folder" if folder.exists() else "there is no such folder"
            raise CheckpointError(f"{folder}: {why}")
        self.folder = folder
        self.config = read_json(folder / CONFIG)
        has_generation = (folder / GENERATION_CONFIG).is_file()
        self.generation_config = read_json(folder / GENERATION_CONFIG) if has_generation else None
        self.notices: tuple[str, ...] = ()
        self.shapes: dict[str, Shape] = {}
        self._tags: dict[str, str] = {}
        self._places: dict[str, tuple[WeightFile, str]] = {}  # name of a tensor -> its file, and its name there
        self.files = _weight_files(folder)
        """File -> the tensors that the index says are in it; None without an index."""
        for name, listed in self.files.items():
            self._open(folder / name, listed)

    def _open(self, path: Path, listed: set[str] | None) -> None:
        file = PickleFile(path) if path.suffix == ".bin" else SafetensorsFile(path)
        if isinstance(file, PickleFile):
            notice = "its weights are .bin pickles, read without running any code in them; an export writes safetensors"
            if not file.is_mapped:
                notice += "; they are of the format before torch 1.6, so each file was read whole into memory"
            self.notices = (notice,)
        if listed is not None and set(file.shapes) != listed:
            name = min(set(file.shapes) ^ listed)
            which = "holds {}, which the index places elsewhere" if name in file.shapes else "holds no {}"
            raise CheckpointError(
                f"{path}: {which.format(printable(name))}: the index and the files are not of one model"
            )
        self.shapes |= file.shapes
        self._tags |= file.tags
        self._places |= {name: (file, name) for name in file.shapes}

    @property
    def bytes(self) -> int:
        """Size of all files with weights."""
        return sum((self.folder / name).stat().st_size for name in self.files)

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype that a tensor is stored in."""
        return DTYPES[self._tags[name]]

    def add_prefix(self, prefix: str, wanted: Iterable[str]) -> None:
        """Adds `prefix` to the folder's names if they are those of a model without its head, which lack it."""
        lacking = {name: name.removeprefix(prefix) for name in wanted if name.startswith(prefix)}
        if any(name in self.shapes for name in lacking):
            return
        for name, stored in lacking.items():
            if stored in self.shapes:
                self.shapes[name], self._tags[name] = self.shapes.pop(stored), self._tags.pop(stored)
                self._places[name] = self._places.pop(stored)

    def check_tensors(
        self, wanted: Mapping[str, Shape], copies: Mapping[str, str], ignored: Callable[[str], bool]
    ) -> None:
        """Checks that every tensor of the folder is used and every wanted one is there, in its shape.

        `copies`: tensors that may be stored beside the one they must equal, as a tied head beside its embedding.
        """
        missing = sorted(set(wanted) - set(self.shapes))
        if missing:
            raise CheckpointError(f"{self.folder}: has no tensor {_first_of(missing)}, which its config.json asks for")
        unused = sorted(name for name in set(self.shapes) - set(wanted) - set(copies) if not ignored(name))
        if unused:
            raise CheckpointError(
                f"{self.folder}: has tensor {_first_of(unused)}, which its config.json has no use for"
            )
        for name, shape in wanted.items():
            if self.shapes[name] != shape:
                raise CheckpointError(
                    f"{self.folder}: {name} is {list(self.shapes[name])}, its config.json asks for {list(shape)}"
                )
        for name in (*wanted, *(copy for copy in copies if copy in self.shapes)):
            if self._tags[name] not in DTYPES:
                raise CheckpointError(
                    f"{self.folder}: {name} is stored as {self._tags[name]}: only {', '.join(DTYPES)} are read"
                )
        for copy, original in copies.items():
            if copy in self.shapes and not (
                self.shapes[copy] == self.shapes[original]
                and all(
                    torch.equal(self.read(copy, block).float(), self.read(original, block).float())
                    for block in row_blocks(self.shapes[copy], 4)
                )
            ):
                raise CheckpointError(
                    f"{self.folder}: {copy} is not {original}, though config.json ties them: "
                    "set tie_word_embeddings to false there if both are meant"
                )

    def read(self, name: str, source: Slices | None = None) -> Tensor:
        """Returns a slice (default: all) of a tensor in its stored dtype, a view of the mapped file."""
        file, stored = self._places[name]
        return file.read(stored, source or tuple(slice(0, n) for n in self.shapes[name]))


def _first_of(names: list[str]) -> str:
    return printable(names[0]) if len(names) == 1 else f"{printable(names[0])} (and {len(names) - 1} more)"


def _weight_files(folder: Path) -> Mapping[str, set[str] | None]:
    """Returns file -> its tensors by the index, None without an index; chosen as transformers does."""
    for whole, index in ((WEIGHTS, INDEX), (PICKLE, PICKLE_INDEX)):
        if (folder / whole).is_file():
            return {whole: None}
        if (folder / index).is_file():
            return _indexed_files(folder, index)
    raise CheckpointError(f"{folder}: has no weights: none of {WEIGHTS}, {INDEX}, {PICKLE} and {PICKLE_INDEX}")


def _indexed_files(folder: Path, index: str) -> Mapping[str, set[str]]:
    places = read_json(folder / index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{folder / index}: has no weight_map")
    files: dict[str, set[str]] = {}
    for tensor, name in places.items():
        if not isinstance(name, str) or Path(name).name != name:
            where = printable(f"{tensor} outside the folder, in {name!r}")
            raise CheckpointError(f"{folder / index}: places {where}")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: not a complete model: {printable(name)} of the index is missing")
        files.setdefault(name, set()).add(tensor)
    return files


def write_configs(folder: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> None:
    for name, values in ((CONFIG, config), (GENERATION_CONFIG, generation_config)):
        (folder / name).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def write_weights(
    folder: Path, entries: Sequence[Entry], blocks: Callable[[Entry], Iterable[Tensor]], shard_bytes: int = SHARD_BYTES
) -> int:
    """Streams tensors (hub names) into `folder` as safetensors; returns the number of bytes.

    `blocks` gives an entry's numbers in row-major order, in tensors of its dtype. transformers' layout: one
    `model.safetensors`, or numbered files and an index.
    """
    shards = shard_names(entries, shard_bytes)
    total = sum(entry.size for entry in entries)
    places: dict[str, str] = {}
    for name, shard in shards.items():
        write_safetensors(folder / name, shard, blocks, is_hashed=False)
        places |= {entry.key: name for entry in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def shard_names(entries: Sequence[Entry], shard_bytes: int) -> dict[str, list[Entry]]:
    """Returns file name -> its tensors."""
    shards = into_files(entries, shard_bytes)
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}
    numbered = enumerate(shards, start=1)
    return {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in numbered}


def row_blocks(shape: Shape, bytes_per_number: int) -> Iterator[Slices]:
    """Yields slices that cover a tensor in blocks of whole rows of about `BLOCK_BYTES`."""
    rows, *rest = shape
    row_bytes = bytes_per_number * torch.Size(rest).numel()
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for first in range(0, rows, step):
        yield (slice(first, min(rows, first + step)), *(slice(0, n) for n in rest))
