"""Streams weights from one format to the other: block by block, in the target's dtype, counted, checked, validated."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import fields

import torch
from torch import Tensor

from launch.conversion.huggingface.progress import (
    ConversionPlan,
    ConvertSummary,
    PeakMemory,
    ReportProgress,
    one_thread,
)
from launch.conversion.huggingface.serial_model import Read
from launch.conversion.huggingface.validation import Validation
from launch.errors import LaunchError
from megalite.checkpoint.huggingface.folder import row_blocks
from megalite.checkpoint.manifest import Slices
from megalite.checkpoint.reader import CheckpointReader
from megalite.config.errors import one_line


class Stream:
    """The blocks of one conversion."""

    def __init__(self, target: str, total_bytes: int, report: ReportProgress) -> None:
        """Prepares to write `total_bytes` to `target`."""
        self._what, self._total, self._report = f"writing {target}", total_bytes, report
        self._buffer = _ReusedBuffer()
        self.bytes = 0  # yielded so far
        self.strange: dict[str, str] = {}  # names of tensors with NaN or infinity, and what they hold

    def blocks(self, read: Read, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Tensor]:
        """Yields the tensor `name` in row-major order. A block is valid only until the next one is requested."""
        for source in row_blocks(shape, 4):
            numbers = stored = read(name, source)
            if numbers.dtype != dtype or not numbers.is_contiguous():
                numbers = self._buffer.view(numbers.shape, dtype).copy_(numbers)
            if not _is_finite(numbers) and name not in self.strange:
                self.strange[name] = "holds NaN or infinite numbers: the model computes nothing of use"
                if _is_finite(stored):
                    largest, form = float(stored.flatten()[stored.abs().argmax()]), str(dtype).removeprefix("torch.")
                    self.strange[name] = f"holds {largest:g}, which is too large for {form}: take another --dtype"
            yield numbers
            self.bytes += numbers.nbytes
            self._report(self._what, self.bytes, self._total)

    @property
    def notices(self) -> tuple[str, ...]:
        """Warnings about the values of the weights."""
        problems = [f"{name} {what}" for name, what in self.strange.items()]
        return (one_line(problems),) if problems else ()


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


def checkpoint_blocks(reader: CheckpointReader) -> Read:
    """Returns a reader of fp32 blocks: views of a checkpoint's files, or numbers that the next call overwrites."""
    buffer = _ReusedBuffer()

    def read(name: str, source: Slices) -> Tensor:
        if (view := reader.view(name, source)) is not None:
            return view
        numbers = buffer.view(torch.Size([s.stop - s.start for s in source]), torch.float32)
        reader.fill(numbers, name, source)
        return numbers

    return read


def convert(
    plan: ConversionPlan,
    write: Callable[[Stream], object],
    validate: Callable[[], Validation] | None,
    what: str,
    report: ReportProgress,
) -> ConvertSummary:
    """Calls `write`, which passes all weights through a stream, and then `validate`.

    Raises LaunchError with `what` if weights that are to be validated are not finite.
    """
    stream, started = Stream(plan.target, plan.bytes_written, report), time.monotonic()
    with PeakMemory() as peak, one_thread():
        write(stream)
    seconds = time.monotonic() - started
    if validate is not None and stream.strange:
        raise LaunchError(f"{what} {stream.notices[0]}, so nothing was written; --no-validate converts it as it is")
    validation = Validation() if validate is None else validate()
    both = {each.name: getattr(plan, each.name) for each in fields(ConvertSummary) if hasattr(plan, each.name)}
    return ConvertSummary(
        **both | {"notices": (*plan.notices, *stream.notices, *validation.notices)},
        logit_difference=validation.difference,
        compared=validation.compared,
        seconds=seconds,
        validation_seconds=validation.seconds,
        peak_memory_bytes=peak.bytes,
    )
