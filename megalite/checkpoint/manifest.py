"""The manifest of a checkpoint. It is written last, so a folder that has one is complete.

A checkpoint is layout-free. Its tensors are addressed by canonical name and global slice: the key of each entry of a
safetensors file says which block of which global tensor it is, so any layout reads what any other wrote.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from math import isfinite, prod
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.foreign_folders import foreign_checkpoint
from megalite.config.sections import AdapterConfig
from megalite.config.suggestions import nearest_path

MANIFEST = "manifest.json"
LATEST = "latest"
WEIGHT = "weight"
MANIFEST_BYTES = 1 << 25  # more than any model's takes
STEP = re.compile(r"step_[0-9]{8,18}")
Slices = tuple[slice, ...]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Size = Annotated[int, Field(gt=0, lt=1 << 63)]
Name = Annotated[str, Field(pattern="^[!-~]+$")]  # printed in sentences and tables


class FileEntry(BaseModel):
    """Size and digest of one file as it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: Count  # bytes
    sha256: str


class Manifest(BaseModel):
    """Contents of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")  # null: not evaluated
    digest: str = ""  # SHA-256 of what follows it in the file: the only check that finds a bit that flipped in `state`
    format: Literal["megalite-checkpoint"] = "megalite-checkpoint"
    version: Literal[2] = 2
    step: Count
    written: str = ""  # ISO 8601 with offset
    layout: dict[str, int] = {}  # what wrote it: tensor_parallel_size ... zero_stage; empty for one process
    evaluation_loss: float | None = None  # of this step, where it was evaluated
    config: dict[str, Any]  # resolved config of the run; only `model` for an imported checkpoint
    tokenizer: str | None  # folder of the tokenizer the data was prepared with
    tokenizer_sha256: str | None = None  # of its tokenizer.json, or of what its folder adds to it; None where unknown
    state: dict[str, Any]  # megalite.training.state.TrainState; empty for an imported checkpoint
    moments: tuple[Name, ...] = ()  # optimizer state tensors beside the weights
    other_moments: dict[Name, tuple[Name, ...]] = {}  # of tensors that keep others, by canonical name
    optimizer_steps: Count = 0  # steps the optimizer took, for Adam's bias correction
    loss_scaler: dict[str, float] = {}  # fp16 only
    tensors: dict[Name, Annotated[tuple[Size, ...], Field(min_length=1)]]  # canonical name -> global shape
    files: dict[str, FileEntry]

    @property
    def written_at(self) -> float:
        """When it was written, in unix seconds; 0 where that is unknown."""
        try:
            return datetime.fromisoformat(self.written).timestamp()
        except ValueError:
            return 0.0

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Returns what the checkpoint holds of a tensor: its weight, and the moments that its update rule keeps."""
        return (WEIGHT, *self.other_moments.get(name, self.moments))

    def sealed(self) -> bytes:
        """Returns the bytes of the manifest's file, with its digest."""
        as_read = Manifest.model_validate_json(self.model_dump_json(exclude={"digest"}))
        text = as_read.model_dump_json(indent=1)
        return as_read.model_copy(update={"digest": _digest_of(text.encode())}).model_dump_json(indent=1).encode()


def step_folder(step: int) -> str:
    """Returns the name of a step's checkpoint folder."""
    return f"step_{step:08d}"


def step_of(name: str) -> int:
    """Returns the step in the name of a checkpoint folder."""
    return int(name.removeprefix("step_"))


def step_names(names: Iterable[str]) -> list[str]:
    """Returns the names of checkpoint folders among `names` by step, without copies (`step_00000005_kept`)."""
    return sorted(filter(STEP.fullmatch, names), key=step_of)


def step_folders(root: Path) -> list[Path]:
    """Lists checkpoint folders in `root` by step, complete or not."""
    return [root / name for name in step_names(path.name for path in root.glob("step_*"))]


def entry(kind: str, name: str, source: Slices) -> str:
    """Returns the key of a block in a file: `weight/layers.0.mlp.weight@128,0`; its extent is the entry's shape."""
    return f"{kind}/{name}@{','.join(str(s.start) for s in source)}"


def parse_entry(key: str, shape: Sequence[int]) -> tuple[str, str, Slices]:
    """Returns kind, canonical name and block of an entry. Raises ValueError for a foreign key."""
    kind, _, rest = key.partition("/")
    name, _, corner = rest.rpartition("@")
    starts = [int(start) for start in corner.split(",")]
    if not name or len(starts) != len(shape) or min(starts) < 0:
        raise ValueError(key)
    return kind, name, tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a checkpoint folder. Raises CheckpointError if the folder is not complete.

    Nothing of it is trusted: names and numbers may have been made up to harm the reader.
    """
    path = folder / MANIFEST
    try:
        if not path.is_file():
            raise CheckpointError(no_checkpoint(folder))
        if path.is_symlink():
            raise CheckpointError(f"{path}: is a link, which may lead outside its folder: copy the file itself")
        if (size := path.stat().st_size) > MANIFEST_BYTES:
            raise CheckpointError(f"{path}: not a manifest of this version: {size} bytes are too many for one")
        manifest = parse_manifest(path.read_bytes(), path)
        if STEP.fullmatch(folder.name) and step_of(folder.name) != manifest.step:
            raise CheckpointError(
                f"{folder}: its {MANIFEST} is of step {manifest.step}: a copy of another step's folder; "
                f"copies have other names than a run's own, such as {step_folder(manifest.step)}_kept"
            )
        for name, recorded in manifest.files.items():
            file = folder / name
            if file.is_symlink():
                raise CheckpointError(
                    f"{folder}: {name} is a link, which may lead outside its folder: copy the file itself"
                )
            check_size(folder, name, recorded, file.stat().st_size if file.is_file() else None)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}") from None
    return manifest


def no_checkpoint(path: Path) -> str:
    """Returns a sentence that says why a path without a manifest is no checkpoint."""
    if not path.is_dir():
        if path.exists():
            return f"{path}: is a file, no checkpoint folder"
        return f"{path}: there is no such checkpoint folder{nearest_path(path)}"
    if (path / "config.json").is_file():
        return f"{path}: is a Hugging Face folder, no checkpoint: `megalite import` makes one of it"
    if foreign := foreign_checkpoint(path):
        return f"{path}: holds {foreign[0]}, which is not read here: {foreign[1]}"
    if STEP.fullmatch(path.name):
        return f"{path}: not a complete checkpoint: it has no {MANIFEST}, the save was interrupted"
    return (
        f"{path}: not a complete checkpoint: it has no {MANIFEST}, nor folders such as {step_folder(10)} that have one"
    )


def parse_manifest(data: bytes, path: Path | str) -> Manifest:
    """Parses a manifest and checks that it is consistent; `path` is for messages. Raises CheckpointError."""
    try:
        manifest = Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "its text"
        why = printable(f"{where}: {first['msg']}")
        raise CheckpointError(f"{path}: not a manifest of this version: {why}") from None
    try:
        json.loads(data, object_pairs_hook=_once, parse_constant=_finite, parse_float=_finite)
    except ValueError as error:  # as pydantic has read it, the last of two values counts, and NaN is a number
        raise CheckpointError(f"{path}: not a manifest of this version: {printable(str(error))}") from None
    if manifest.digest and manifest.digest != _digest_of(data):
        raise CheckpointError(f"{path}: has changed since it was written: its digest differs")
    for name in manifest.files:
        if PurePosixPath(name).name != name or not name.isprintable():
            raise CheckpointError(f"{path}: names a file outside its folder: {printable(name)}")
    claimed, held = sum(map(prod, manifest.tensors.values())), sum(file.size for file in manifest.files.values())
    if claimed > held:  # a number takes a byte at least: no reader allocates more than the files could fill
        raise CheckpointError(f"{path}: names more numbers than the {held} bytes of its files can hold")
    return manifest


def adapter_of(manifest: Manifest, folder: Path) -> AdapterConfig:
    """Returns the adapters of the run that saved a checkpoint; `folder` is for messages. Raises CheckpointError."""
    try:
        return AdapterConfig.model_validate(manifest.config.get("adapter"))
    except ValidationError as error:
        first = error.errors()[0]
        what = printable(f"adapter.{'.'.join(map(str, first['loc']))}: {first['msg']}")
        raise CheckpointError(f"{folder}: its manifest describes no adapters of this version: {what}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the pairs of a JSON object. Raises ValueError for a key that stands twice: readers may differ on it."""
    values = dict(pairs)
    if len(values) != len(pairs):
        (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f'its key "{twice}" stands twice')
    return values


def _finite(text: str) -> float:
    """Returns the number that JSON text holds. Raises ValueError for NaN and infinity, which we never write."""
    if not isfinite(number := float(text)):
        raise ValueError(f"it holds the number {text}, which is not finite")
    return number


def check_size(folder: Path | str, name: str, recorded: FileEntry, actual: int | None) -> None:
    """Raises CheckpointError if the size of a file in `folder` is not the recorded one; None: it is missing."""
    if actual != recorded.size:
        found = "is missing" if actual is None else f"has {actual} bytes, not {recorded.size}"
        raise CheckpointError(f"{folder}: not a complete checkpoint: {name} {found}")


def _digest_of(text: bytes) -> str:
    """Returns the digest of all fields but the first, which is the digest itself."""
    return hashlib.sha256(text.partition(b",")[2]).hexdigest()


def printable(text: str) -> str:
    """Returns `text` from a file in one line without control characters, short enough for a message."""
    line = "".join(c if c.isprintable() else "?" for c in text)
    return line if len(line) <= 200 else f"{line[:200]}..."


def find_latest(root: Path) -> tuple[Path | None, list[str]]:
    """Returns the newest complete checkpoint under `root`, and why newer folders were skipped.

    `root` is a checkpoint folder, a folder of checkpoints, or a run folder. `latest` is not trusted: it is moved after
    the folder it names, so a kill in between leaves it one behind.
    """
    if (root / "checkpoints").is_dir():
        root = root / "checkpoints"
    folders = step_folders(root)[::-1] or ([root] if root.is_dir() else [])
    skipped = []
    for folder in folders:
        try:
            read_manifest(folder)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return folder, skipped
    return None, skipped
