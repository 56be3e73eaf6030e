"""Reading a checkpoint: any slice of any global tensor, whichever ranks wrote its pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.files import digest
from megalite.checkpoint.manifest import WEIGHT, Slices, decode_pieces, entry, find_latest, read_manifest


class CheckpointReader:
    """A complete checkpoint folder. Raises CheckpointError, one sentence, where it is not one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._files: dict[str, Any] = {}
        self._pieces: dict[str, dict[tuple[tuple[int, int], ...], str]] = {}  # entry -> source -> file
        for name in self.manifest.files:
            path = folder / name
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not readable as safetensors: {error}") from None
            self._files[name] = file
            for key, source in decode_pieces(file.metadata(), path).items():
                self._pieces.setdefault(key, {})[tuple((s.start, s.stop) for s in source)] = name

    def read(self, name: str, source: Slices | None = None, kind: str = WEIGHT) -> Tensor:
        """A slice (default: all) of the global tensor `name`, fp32; `kind` is `weight` or one of `manifest.moments`."""
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.folder}: holds no tensor {name}: it is of another model")
        shape = self.manifest.tensors[name]
        wanted = source or tuple(slice(0, n) for n in shape)
        result = torch.empty([s.stop - s.start for s in wanted], dtype=torch.float32)
        missing = result.numel()
        for bounds, file in self._pieces.get(entry(kind, name), {}).items():
            common = [slice(max(w.start, a), min(w.stop, b)) for w, (a, b) in zip(wanted, bounds, strict=True)]
            if any(c.start >= c.stop for c in common):
                continue
            inside = tuple(slice(c.start - a, c.stop - a) for c, (a, _) in zip(common, bounds, strict=True))
            target = tuple(slice(c.start - w.start, c.stop - w.start) for c, w in zip(common, wanted, strict=True))
            block = self._files[file].get_slice(entry(kind, name))[inside]
            result[target] = block
            missing -= block.numel()
        if missing:
            raise CheckpointError(f"{self.folder}: {kind} of {name} is not whole: {missing} numbers are missing")
        return result

    def verify_digests(self) -> None:
        """Reads every file and compares its SHA-256. Raises CheckpointError naming the first that differs."""
        for name, recorded in self.manifest.files.items():
            if digest(self.folder / name) != recorded:
                raise CheckpointError(f"{self.folder}: {name} has changed since it was written: its digest differs")


def open_checkpoint(path: Path) -> CheckpointReader:
    """The checkpoint at `path`, or the newest complete one under it."""
    folder, skipped = find_latest(path)
    if folder is None:
        reason = skipped[0] if skipped else f"{path}: there is no such checkpoint folder"
        raise CheckpointError(reason)
    return CheckpointReader(folder)
