"""Reads single weight files of a Hugging Face folder: safetensors, and the pickles of older models.

In: a path. Out: names, shapes and dtypes of what it holds, and any slice of it as a view of the mapped file. A file is
refused with a CheckpointError, one sentence; a pickle runs no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import zipfile
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.safetensors_writer import DTYPES, TAGS
from megalite.checkpoint.manifest import Slices, printable

Shape = tuple[int, ...]
AHEAD_BYTES = 16 << 20  # asked of the disk before they are read: page faults alone ask for 128 KB at a time
UNWANTED = re.compile(r"GLOBAL ([\w.]+)")  # in torch's message about a pickle that would call something


class SafetensorsFile:
    """A safetensors file, mapped."""

    def __init__(self, path: Path) -> None:
        self.shapes: dict[str, Shape] = {}
        self.tags: dict[str, str] = {}  # how numbers are stored, in safetensors' words: F32, BF16, I8 ...
        try:
            self._file = safe_open(path, framework="pt")
            for name in self._file.keys():  # noqa: SIM118  # no mapping
                entry = self._file.get_slice(name)
                self.shapes[name], self.tags[name] = tuple(entry.get_shape()), entry.get_dtype()
            self._bytes = path.open("rb", buffering=0)
            header = int.from_bytes(self._bytes.read(8), "little")
            described = json.loads(self._bytes.read(header))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{path}: not readable as safetensors, perhaps cut short: {printable(str(error))}"
            ) from None
        self._starts = {name: 8 + header + described[name]["data_offsets"][0] for name in self.shapes}
        self._asked = 0  # end of what has been asked of the disk, an offset in the file

    def read(self, name: str, source: Slices) -> Tensor:
        """Returns a slice of a tensor, a view of the mapped file, whose pages are read on use."""
        shape = self.shapes[name]
        if source and all(s.start == 0 and s.stop == n for s, n in zip(source[1:], shape[1:], strict=True)):
            row = torch.Size(shape[1:]).numel() * DTYPES[self.tags[name]].itemsize
            self._ask_for(*(self._starts[name] + row * end for end in (source[0].start, source[0].stop)))
        return self._file.get_slice(name)[source]

    def sha256(self) -> str:
        """Returns the digest of the whole file, also after it was removed."""
        self._bytes.seek(0)
        return hashlib.file_digest(self._bytes, "sha256").hexdigest()

    def _ask_for(self, start: int, stop: int) -> None:
        """Starts reading bytes [start, stop) and some after them from disk; returns at once."""
        first = self._asked if start <= self._asked < stop + AHEAD_BYTES else start
        if first < stop + AHEAD_BYTES // 2:
            self._asked = stop + AHEAD_BYTES
            with suppress(OSError, AttributeError):  # advice; macOS has no such call
                os.posix_fadvise(self._bytes.fileno(), first, self._asked - first, os.POSIX_FADV_WILLNEED)


class PickleFile:
    """A `pytorch_model.bin`, read by torch's restricted unpickler, which only builds tensors.

    Mapped, unless it is of the format before torch 1.6, which can only be read whole.
    """

    def __init__(self, path: Path) -> None:
        self.is_mapped = zipfile.is_zipfile(path)
        try:
            if self.is_mapped and any(part.compress_type for part in zipfile.ZipFile(path).infolist()):
                raise ValueError("its parts are compressed, as torch never writes them")  # mapped, they are no numbers
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=self.is_mapped)
        except pickle.UnpicklingError as error:
            found = UNWANTED.search(str(error))
            asks = f"it asks for {printable(found[1])}, which is no weight" if found else None
            what = asks or "it is not a pickle of weights alone"
            raise CheckpointError(f"{path}: {what}: none of its code was run, do not trust where it is from") from None
        except Exception as error:  # a pickle can be wrong in any way
            why = next(iter(str(error).splitlines()), type(error).__name__)
            raise CheckpointError(f"{path}: not readable as weights, perhaps cut short: {printable(why)}") from None
        if not isinstance(loaded, dict) or not all(
            isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
            for value in loaded.values()
        ):
            raise CheckpointError(f"{path}: holds something else than named tensors")
        self._tensors: dict[str, Tensor] = {str(name): tensor for name, tensor in loaded.items()}
        self.shapes: dict[str, Shape] = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}
        self.tags = {name: TAGS.get(tensor.dtype, str(tensor.dtype)) for name, tensor in self._tensors.items()}

    def read(self, name: str, source: Slices) -> Tensor:
        """Returns a slice of a tensor, as a view."""
        return self._tensors[name].detach()[source]


WeightFile = SafetensorsFile | PickleFile
