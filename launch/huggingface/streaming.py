"""Streams weights from one format to the other: block by block, in the target's dtype, counted and checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from launch.huggingface.progress import ReportProgress
from launch.huggingface.serial_model import Read
from megalite.checkpoint.huggingface.folder import row_blocks
from megalite.checkpoint.manifest import Slices
from megalite.checkpoint.reader import CheckpointReader


class Stream:
    """The blocks of one conversion."""

    def __init__(self, target: Path, total_bytes: int, report: ReportProgress) -> None:
        """Prepares to write `total_bytes` to `target`."""
        self._what, self._total, self._report = f"writing {target}", total_bytes, report
        self._buffer = _ReusedBuffer()
        self.bytes = 0  # yielded so far
        self.not_finite: list[str] = []  # names of tensors with NaN or infinity

    def blocks(self, read: Read, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        """Yields the tensor `name` in row-major order. A block is valid only until the next one is requested."""
        for source in row_blocks(shape, 4):
            numbers = read(name, source)
            if numbers.dtype != dtype or not numbers.is_contiguous():
                numbers = self._buffer.view(numbers.shape, dtype).copy_(numbers)
            if not _is_finite(numbers) and name not in self.not_finite:
                self.not_finite.append(name)
            yield numbers
            self.bytes += numbers.nbytes
            self._report(self._what, self.bytes, self._total)

    @property
    def notices(self) -> tuple[str, ...]:
        """Warnings about the values of the weights."""
        if not self.not_finite:
            return ()
        more = f" and {len(self.not_finite) - 1} more tensors hold" if len(self.not_finite) > 1 else " holds"
        return (f"{self.not_finite[0]}{more} NaN or infinite numbers: the model computes nothing of use",)


def _is_finite(numbers: Tensor) -> bool:
    # a sum runs at memory speed and is finite only for finite numbers; otherwise it may have overflowed
    return math.isfinite(float(numbers.sum())) or bool(numbers.isfinite().all())


class _ReusedBuffer:
    """Memory that each block reuses: fresh pages would cost more than the copy into them."""

    def __init__(self) -> None:
        self._numbers: dict[torch.dtype, Tensor] = {}

    def view(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        held = self._numbers.get(dtype)
        if held is None or held.numel() < shape.numel():
            held = self._numbers[dtype] = torch.empty(shape.numel(), dtype=dtype)
        return held[: shape.numel()].view(shape)


class CheckpointBlocks:
    """Reads blocks of a checkpoint's weights, as views of its files or into a buffer that the next read overwrites."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader, self._buffer = reader, _ReusedBuffer()

    def read(self, name: str, source: Slices) -> Tensor:
        """Returns a block in fp32."""
        if (view := self._reader.view(name, source)) is not None:
            return view
        numbers = self._buffer.view(torch.Size([s.stop - s.start for s in source]), torch.float32)
        self._reader.fill(numbers, name, source)
        return numbers
