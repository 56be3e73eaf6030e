"""Weights on their way from one format to the other: block by block, in the target's dtype, counted and looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from launch.convert.progress import Tell
from launch.convert.serial import Read
from megalite.checkpoint.hugging_face import row_blocks
from megalite.checkpoint.manifest import Slices
from megalite.checkpoint.reader import CheckpointReader


class Stream:
    """All blocks of one conversion."""

    def __init__(self, target: Path, total_bytes: int, tell: Tell) -> None:
        """`total_bytes` are written, to `target`."""
        self._what, self._total, self._tell = f"writing {target}", total_bytes, tell
        self._room = _Room()
        self.bytes = 0  # that have come out
        self.not_finite: list[str] = []  # names of tensors with NaN or infinity

    def blocks(self, read: Read, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        """The tensor `name` in row-major order. A block is gone when the next one is asked for."""
        for source in row_blocks(shape, 4):
            numbers = read(name, source)
            if numbers.dtype != dtype or not numbers.is_contiguous():
                numbers = self._room.of(numbers.shape, dtype).copy_(numbers)
            if not _is_finite(numbers) and name not in self.not_finite:
                self.not_finite.append(name)
            yield numbers
            self.bytes += numbers.nbytes
            self._tell(self._what, self.bytes, self._total)

    @property
    def notices(self) -> tuple[str, ...]:
        """What the numbers themselves gave reason to say."""
        if not self.not_finite:
            return ()
        more = f" and {len(self.not_finite) - 1} more tensors hold" if len(self.not_finite) > 1 else " holds"
        return (f"{self.not_finite[0]}{more} NaN or infinite numbers: the model computes nothing of use",)


def _is_finite(numbers: Tensor) -> bool:
    """A sum runs at the memory's speed and is finite only of finite numbers; that it is not may be overflow."""
    return math.isfinite(float(numbers.sum())) or bool(numbers.isfinite().all())


class _Room:
    """Memory for a block that is used again for the next: fresh pages would cost more than the copy into them."""

    def __init__(self) -> None:
        self._numbers: dict[torch.dtype, Tensor] = {}

    def of(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        held = self._numbers.get(dtype)
        if held is None or held.numel() < shape.numel():
            held = self._numbers[dtype] = torch.empty(shape.numel(), dtype=dtype)
        return held[: shape.numel()].view(shape)


class CheckpointBlocks:
    """Blocks of a checkpoint's weights, as views of its files or all in one memory: what was read before is gone."""

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader, self._room = reader, _Room()

    def read(self, name: str, source: Slices) -> Tensor:
        """fp32."""
        if (view := self._reader.view(name, source)) is not None:
            return view
        numbers = self._room.of(torch.Size([s.stop - s.start for s in source]), torch.float32)
        self._reader.fill(numbers, name, source)
        return numbers
