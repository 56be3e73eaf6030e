"""Writing a checkpoint: pieces of tensors into files under a temporary name, then a commit.

The commit is the only moment at which a checkpoint starts to exist: files synced, manifest written and synced, folder
renamed, `latest` moved last. A kill at any instant leaves the previous checkpoint whole and at most a hidden
temporary folder, which the next save removes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.files import digest, sync, write_durably
from megalite.checkpoint.manifest import LATEST, MANIFEST, WEIGHT, FileEntry, Manifest, Slices, encode_pieces, entry

FILE_BYTES = 1 << 30  # a file is closed once it holds this much: the host memory that a save needs


class PieceWriter:
    """One rank's files inside a checkpoint folder that is being written."""

    def __init__(self, folder: Path, prefix: str) -> None:
        self._folder, self._prefix = folder, prefix
        self._tensors: dict[str, Tensor] = {}
        self._sources: dict[str, Slices] = {}
        self.files: dict[str, FileEntry] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def add(self, kind: str, name: str, shape: tuple[int, ...], source: Slices, tensor: Tensor) -> None:
        """Takes one block of one global tensor; `tensor` is copied to the host."""
        self.shapes[name] = shape
        self._tensors[entry(kind, name)] = tensor.detach().to("cpu", copy=True).contiguous()
        self._sources[entry(kind, name)] = source
        if sum(t.nbytes for t in self._tensors.values()) >= FILE_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes and syncs what has been taken since the last file."""
        if not self._tensors:
            return
        path = self._folder / f"{self._prefix}_{len(self.files):03d}.safetensors"
        try:
            save_file(self._tensors, path, metadata=encode_pieces(self._sources))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: cannot be written: {error}: free some space, or choose another run_dir"
            ) from None
        sync(path)
        self.files[path.name] = digest(path)
        self._tensors, self._sources = {}, {}


def temporary_folder(folder: Path) -> Path:
    """Where a checkpoint is written before it is committed as `folder`."""
    return folder.with_name(f".{folder.name}.tmp")


def start(folder: Path) -> Path:
    """Makes the empty temporary folder of a checkpoint, removing what interrupted saves left beside it."""
    temporary = temporary_folder(folder)
    try:
        for left_over in folder.parent.glob(".step_*.tmp"):
            shutil.rmtree(left_over)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{folder.parent}: cannot write a checkpoint here: {error.strerror}") from None
    return temporary


def commit(folder: Path, manifest: Manifest) -> None:
    """Turns the temporary folder, whose files are all synced, into the checkpoint `folder`, and moves `latest`."""
    temporary = temporary_folder(folder)
    write_durably(temporary / MANIFEST, manifest.model_dump_json(indent=1).encode())
    if folder.exists():  # only an incomplete one: a run never resumes before a complete checkpoint of its own
        shutil.rmtree(folder)
    temporary.rename(folder)
    sync(folder.parent)
    write_durably(folder.parent / LATEST, folder.name.encode())


def write_single(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    step: int,
    config: dict[str, Any],
    tokenizer: str | None,
    state: dict[str, Any],
) -> None:
    """A weights-only checkpoint from one process: whole tensors by canonical name, stored as fp32."""
    temporary = start(folder)
    try:
        writer = PieceWriter(temporary, "single")
        for name, tensor in tensors:
            whole = tuple(slice(0, n) for n in tensor.shape)
            writer.add(WEIGHT, name, tuple(tensor.shape), whole, tensor.float())
        writer.flush()
        manifest = Manifest(
            step=step, config=config, tokenizer=tokenizer, state=state, tensors=writer.shapes, files=writer.files
        )
        commit(folder, manifest)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
