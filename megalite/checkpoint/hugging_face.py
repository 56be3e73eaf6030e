"""Hugging Face folders as files: `config.json`, safetensors with or without an index, a tokenizer's files.

Reading: any slice of any tensor, after every tensor has been accounted for. Writing: weights streamed in blocks of
rows into shards of at most 2 GB, everything in a folder that is renamed into place once it is whole. Names of tensors
come in as plain dicts in the hub's spelling: which family spells how is not known here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.files import sync
from megalite.checkpoint.manifest import Slices
from megalite.checkpoint.safetensors_file import DTYPES, Entry, write_safetensors
from megalite.checkpoint.writer import start

Shape = tuple[int, ...]

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
SHARD_BYTES = 2 * 10**9  # as transformers reads anywhere, and small enough to fetch again
BLOCK_BYTES = 64 << 20  # of a tensor in memory at once


class HuggingFaceFolder:
    """The weights and config of one folder. Raises CheckpointError, one sentence, where they cannot be read."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such folder")
        self.folder = folder
        self.config = _read_json(folder / CONFIG)
        has_generation = (folder / GENERATION_CONFIG).is_file()
        self.generation_config = _read_json(folder / GENERATION_CONFIG) if has_generation else None
        self._files: dict[str, Any] = {}  # name of a tensor -> the open file that holds it
        self.shapes: dict[str, Shape] = {}
        self.dtypes: set[torch.dtype] = set()
        for name, listed in _weight_files(folder).items():
            self._open(folder / name, listed)

    def _open(self, path: Path, listed: set[str] | None) -> None:
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not readable as safetensors, perhaps cut short: {error}") from None
        found = set(file.keys())
        if listed is not None and found != listed:
            name = min(found ^ listed)
            which = f"holds {name}, which the index places elsewhere" if name in found else f"holds no {name}"
            raise CheckpointError(f"{path}: {which}: the index and the files are not of one model")
        for name in found:
            entry = file.get_slice(name)
            if entry.get_dtype() not in DTYPES:
                raise CheckpointError(
                    f"{path}: {name} is stored as {entry.get_dtype()}: only {', '.join(DTYPES)} are read"
                )
            self._files[name] = file
            self.shapes[name] = tuple(entry.get_shape())
            self.dtypes.add(DTYPES[entry.get_dtype()])

    def account(self, wanted: Mapping[str, Shape], copies: Mapping[str, str], ignored: Callable[[str], bool]) -> None:
        """Every tensor of the folder has a use and every wanted one is there, in its shape.

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
        for copy, original in copies.items():
            if copy in self.shapes and not self._are_equal(copy, original):
                raise CheckpointError(
                    f"{self.folder}: {copy} is not {original}, though config.json ties them: "
                    "set tie_word_embeddings to false there if both are meant"
                )

    def _are_equal(self, name: str, other: str) -> bool:
        if self.shapes[name] != self.shapes[other]:
            return False
        blocks = row_blocks(self.shapes[name], 4)
        return all(torch.equal(self.read(name, block), self.read(other, block)) for block in blocks)

    def read(self, name: str, source: Slices | None = None) -> Tensor:
        """A slice (default: all) of a tensor, in the dtype it is stored in."""
        return self._files[name].get_slice(name)[source or tuple(slice(0, n) for n in self.shapes[name])]


def _first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: not a Hugging Face folder: it has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def _weight_files(folder: Path) -> Mapping[str, set[str] | None]:
    """File -> the tensors that the index says are in it; None without an index."""
    if (folder / WEIGHTS).is_file():  # before an index, as in transformers
        return {WEIGHTS: None}
    if not (folder / INDEX).is_file():
        if any(folder.glob("*.bin")):
            raise CheckpointError(
                f"{folder}: its weights are pickled .bin files, which run code when read: load it with transformers "
                "where you trust it and call save_pretrained, which writes safetensors"
            )
        raise CheckpointError(f"{folder}: has no weights: neither {WEIGHTS} nor {INDEX}")
    places = _read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{folder / INDEX}: has no weight_map")
    files: dict[str, set[str]] = {}
    for tensor, name in places.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{folder / INDEX}: places {tensor} outside the folder, in {name!r}")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: not a complete model: {name} of the index is missing")
        files.setdefault(name, set()).add(tensor)
    return files


@contextmanager
def new_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """A hidden folder beside `folder`, renamed to it when the block ends, removed when the block raises."""
    folder = folder.resolve()
    _refuse_to_replace(folder, overwrite)
    temporary, replaced = start(folder), folder.with_name(f".{folder.name}.replaced")
    try:
        yield temporary
        for path in temporary.iterdir():
            sync(path)
        sync(temporary)
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            folder.rename(replaced)
        temporary.rename(folder)
        sync(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)


def _refuse_to_replace(folder: Path, overwrite: bool) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not overwrite:
        raise CheckpointError(f"{folder}: is there already and not empty: choose another name, or overwrite it")
    if not (folder / CONFIG).is_file():  # a mistyped path must not cost a home folder
        raise CheckpointError(f"{folder}: is not a Hugging Face folder (it has no {CONFIG}), so it is not overwritten")


def write_configs(folder: Path, config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> None:
    for name, values in ((CONFIG, config), (GENERATION_CONFIG, generation_config)):
        (folder / name).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def tokenizer_files(tokenizer: Path) -> list[Path]:
    """The files of a tokenizer; `tokenizer` is its folder or its tokenizer.json."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    return [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]


def copy_tokenizer(files: Iterable[Path], folder: Path) -> None:
    """Copies a tokenizer's files unchanged."""
    for path in files:
        shutil.copyfile(path, folder / path.name)


def write_weights(
    folder: Path,
    shapes: Mapping[str, Shape],
    read: Callable[[str, Slices], Tensor],
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
) -> int:
    """Streams every tensor of `shapes` (hub names) into `folder` as safetensors; returns the bytes of weights.

    transformers' layout: one `model.safetensors`, or numbered files and an index.
    """
    tensors = [Entry(name, shape, dtype) for name, shape in shapes.items()]
    shards = _into_shards(tensors, shard_bytes)
    total = sum(tensor.size for tensor in tensors)
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(
            folder / name, shard, lambda e: (read(e.key, block).to(dtype) for block in row_blocks(e.shape, 4))
        )
        places |= {tensor.key: name for tensor in shard}
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return total


def _into_shards(tensors: Iterable[Entry], shard_bytes: int) -> list[list[Entry]]:
    """In order; a tensor larger than a shard gets one of its own."""
    shards: list[list[Entry]] = []
    room = 0
    for tensor in tensors:
        if not shards or tensor.size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.size
    return shards


def row_blocks(shape: Shape, bytes_per_number: int) -> Iterator[Slices]:
    """Slices that cover a tensor in blocks of whole rows of about `BLOCK_BYTES`."""
    rows, *rest = shape
    row_bytes = bytes_per_number * torch.Size(rest).numel()
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for first in range(0, rows, step):
        yield (slice(first, min(rows, first + step)), *(slice(0, n) for n in rest))
