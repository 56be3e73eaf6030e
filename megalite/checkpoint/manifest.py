"""The manifest of a checkpoint: written last, so a folder that has one is complete.

A checkpoint is layout-free. Its tensors are addressed by canonical name and global slice: each safetensors file says in
its header which block of which global tensor each of its entries is, so any layout reads what any other wrote.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from megalite.checkpoint.errors import CheckpointError

MANIFEST = "manifest.json"
PIECES = "pieces"  # key of a file's header metadata: JSON, entry -> [[start, stop] per dimension]
LATEST = "latest"
WEIGHT = "weight"
Slices = tuple[slice, ...]


class FileEntry(BaseModel):
    """One file as it was written."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    size: int  # bytes
    sha256: str


class Manifest(BaseModel):
    """What a checkpoint holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal["megalite-checkpoint"] = "megalite-checkpoint"
    version: Literal[2] = 2
    step: int
    written: str = ""  # ISO 8601 with offset
    layout: dict[str, int] = {}  # what wrote it: tensor_parallel_size ... zero_stage; empty for one process
    evaluation_loss: float | None = None  # of this step, where it was evaluated
    config: dict[str, Any]  # resolved config of the run; only `model` for an imported checkpoint
    tokenizer: str | None  # folder of the tokenizer the data was prepared with
    tokenizer_sha256: str | None = None  # of its tokenizer.json; None where unknown
    state: dict[str, Any]  # megalite.training.state.TrainState; empty for an imported checkpoint
    moments: tuple[str, ...] = ()  # optimizer state tensors beside the weights
    optimizer_steps: int = 0  # steps the optimizer took, for Adam's bias correction
    loss_scaler: dict[str, float] = {}  # fp16 only
    tensors: dict[str, tuple[int, ...]]  # canonical name -> global shape
    files: dict[str, FileEntry]


def step_folder(step: int) -> str:
    """Name of a step's checkpoint folder."""
    return f"step_{step:08d}"


def entry(kind: str, name: str) -> str:
    """Key of a tensor in a file: `weight`, `exp_avg` ... of a canonical name."""
    return f"{kind}/{name}"


def encode_pieces(pieces: Mapping[str, Slices]) -> dict[str, str]:
    """Header metadata of a file; safetensors allows only strings."""
    return {PIECES: json.dumps({key: [[s.start, s.stop] for s in source] for key, source in pieces.items()})}


def decode_pieces(metadata: Mapping[str, str] | None, path: Path) -> dict[str, Slices]:
    """Inverse of `encode_pieces`. Raises CheckpointError for a file that is not ours."""
    try:
        listed = json.loads((metadata or {})[PIECES])
        return {key: tuple(slice(int(a), int(b)) for a, b in source) for key, source in listed.items()}
    except (KeyError, ValueError, TypeError, AttributeError):
        raise CheckpointError(f"{path}: not a file of a megalite checkpoint: its header names no pieces") from None


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete checkpoint folder. Raises CheckpointError with the reason why it is not one."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint folder")
    if not path.is_file():
        raise CheckpointError(f"{folder}: not a complete checkpoint: it has no {MANIFEST}, the save was interrupted")
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "its text"
        raise CheckpointError(f"{path}: not a manifest of this version: {where}: {first['msg']}") from None
    for name, file in manifest.files.items():
        if Path(name).name != name:
            raise CheckpointError(f"{path}: names a file outside its folder: {name}")
        actual = (folder / name).stat().st_size if (folder / name).is_file() else None
        if actual != file.size:
            found = "is missing" if actual is None else f"has {actual} bytes, not {file.size}"
            raise CheckpointError(f"{folder}: not a complete checkpoint: {name} {found}")
    return manifest


def find_latest(root: Path) -> tuple[Path | None, list[str]]:
    """The newest complete checkpoint under `root`, and why newer folders were passed over.

    `root` is a checkpoint folder, a folder of checkpoints, or a run folder. `latest` is not trusted: it is moved after
    the folder it names, so a kill in between leaves it one behind.
    """
    if (root / "checkpoints").is_dir():
        root = root / "checkpoints"
    folders = sorted(root.glob("step_*"), reverse=True) or ([root] if root.is_dir() else [])
    skipped = []
    for folder in folders:
        try:
            read_manifest(folder)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return folder, skipped
    return None, skipped
