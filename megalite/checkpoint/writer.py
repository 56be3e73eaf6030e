"""Writes a checkpoint: blocks of tensors into files under a temporary name, then a commit.

The commit is the only moment at which a checkpoint starts to exist: files synced, manifest written and synced, folder
renamed, `latest` moved last. A kill at any instant leaves the previous checkpoint whole and at most a hidden
temporary folder, which the next run removes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.durable_files import NO_ROOM, remove, sync, temporary_folder, write_durably
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.fence import fence
from megalite.checkpoint.huggingface.safetensors_writer import Entry, into_files, write_safetensors
from megalite.checkpoint.manifest import (
    LATEST,
    MANIFEST,
    WEIGHT,
    FileEntry,
    Manifest,
    entry,
    read_manifest,
    step_folders,
)

FILE_BYTES = 2 << 30  # of a file, unless one block is larger
SPARE_BYTES = 1 << 20  # for the manifest and the logs


@dataclass(frozen=True)
class Block:
    """One block of one global tensor: its key in a file (`manifest.entry`), and its numbers, stored in fp32."""

    key: str
    numbers: Tensor


def write_blocks(folder: Path, prefix: str, blocks: Sequence[Block]) -> dict[str, FileEntry]:
    """Writes and syncs files `prefix_NNN.safetensors`; returns their entries for the manifest.

    Raises CheckpointError where that cannot be.
    """
    fence.check()  # files of the next attempt may have the same names
    files: dict[str, FileEntry] = {}
    numbers = {block.key: block.numbers for block in blocks}
    entries = [Entry(key, tuple(values.shape), torch.float32) for key, values in numbers.items()]
    for number, group in enumerate(into_files(entries, FILE_BYTES)):
        path = folder / f"{prefix}_{number:03d}.safetensors"
        try:
            files[path.name] = write_safetensors(path, group, lambda entry: [numbers[entry.key].float()])
        except OSError as error:
            raise CheckpointError(cannot_write(path, error)) from None
    return files


def cannot_write(path: Path, error: OSError) -> str:
    """Returns the message for a `path` that cannot be written: the reason and a remedy."""
    why = NO_ROOM.get(error.errno or 0)
    if why is not None:
        return f"{path}: {why}: {_more_room(path)}"
    return f"{path}: cannot be written: {error.strerror or error}: make it writable, or choose another folder"


def _more_room(place: Path) -> str:
    """Returns what makes room at a place in, or of, a folder of checkpoints: of a single one there, none can go."""
    are_several = any(len(step_folders(folder)) > 1 for folder in (place, *place.parents[:2]))
    return f"free some space{', or keep fewer checkpoints (checkpoint.keep_last)' if are_several else ''}"


def check_room(root: Path, size: int) -> None:
    """Raises CheckpointError if `size` more bytes do not fit under `root`."""
    free = shutil.disk_usage(root).free
    if free < size + SPARE_BYTES:
        raise CheckpointError(
            f"{root}: the checkpoint takes {(size + SPARE_BYTES) / 1e6:,.1f} MB with its manifest and the logs, and "
            f"{free / 1e6:,.1f} MB are free: {_more_room(root)}"
        )


def now() -> str:
    """Returns the time for `Manifest.written`: ISO 8601 with offset."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


def start(folder: Path) -> Path:
    """Creates the empty temporary folder of a checkpoint. Raises CheckpointError if it cannot."""
    temporary = temporary_folder(folder)
    try:
        remove(temporary)
        temporary.mkdir(parents=True)
        sync(folder.parent.parent)  # where `checkpoints` may be new
    except OSError as error:
        raise CheckpointError(cannot_write(folder.parent, error)) from None
    return temporary


def discard(folder: Path) -> None:
    """Removes the temporary folder of a checkpoint that will not be committed."""
    remove(temporary_folder(folder))


def commit(folder: Path, manifest: Manifest) -> None:
    """Turns the temporary folder, whose files are all synced, into the checkpoint `folder`, and moves `latest`.

    Raises CheckpointError where that cannot be.
    """
    temporary, replaced = temporary_folder(folder), folder.with_name(f".{folder.name}.replaced")
    try:
        write_durably(temporary / MANIFEST, manifest.sealed())
        fence.check()
        if folder.exists():  # a damaged one that a resume has passed over, or the one that a rollback went back to
            remove(replaced)
            folder.rename(replaced)
        temporary.rename(folder)
    except OSError as error:
        raise CheckpointError(cannot_write(folder, error)) from None
    with suppress(OSError):  # it is there from here on; `latest` is for people
        sync(folder.parent)
        write_durably(folder.parent / LATEST, folder.name.encode())
    remove(replaced)


def write_evaluation(folder: Path, loss: float) -> None:
    """Adds the loss of an evaluation to the manifest of a complete checkpoint. Raises CheckpointError."""
    fence.check()
    manifest = read_manifest(folder).model_copy(update={"evaluation_loss": loss})
    try:
        write_durably(folder / MANIFEST, manifest.sealed())
    except OSError as error:
        raise CheckpointError(cannot_write(folder / MANIFEST, error)) from None


def write_weights_only(
    folder: Path, shapes: Mapping[str, tuple[int, ...]], blocks: Callable[[str], Iterable[Tensor]], manifest: Manifest
) -> None:
    """Writes a weights-only checkpoint into the empty folder `folder` from one process, with one block in memory.

    `shapes`: canonical name -> global shape. `blocks` gives a tensor's fp32 numbers in row-major order. What is in the
    files is filled into `manifest`, which is written last. Raises OSError.
    """
    names = {entry(WEIGHT, name, tuple(slice(0, n) for n in shape)): name for name, shape in shapes.items()}
    entries = [Entry(key, tuple(shapes[name]), torch.float32) for key, name in names.items()]
    files = {}
    for number, group in enumerate(into_files(entries, FILE_BYTES)):
        name = f"single_{number:03d}.safetensors"
        files[name] = write_safetensors(folder / name, group, lambda e: blocks(names[e.key]))
    filled_in = manifest.model_copy(update={"written": now(), "tensors": dict(shapes), "files": files})
    write_durably(folder / MANIFEST, filled_in.sealed())
