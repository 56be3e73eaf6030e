"""Reads weights straight from a Hugging Face folder: every rank reads the blocks it needs, without a checkpoint.

In: the folder's tensors, and the table of where our weights lie in them (`models/hub/tensor_layout.py` makes it;
this room knows no family). Out: what `load_engine` asks of a checkpoint. Numbers go from the mapped file to where the
optimizer keeps them, so a load needs no memory but for a block of a tensor that lies in many places on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megalite.checkpoint.huggingface.folder import row_blocks
from megalite.checkpoint.manifest import WEIGHT, Slices

MOST_THREADS = 8  # each may hold a block in memory
ReadBlock = Callable[[str, Slices], Tensor]


class TensorLayout(Protocol):
    """Maps our weights to the tensors of a Hugging Face folder."""

    def read_own(self, read_hub: ReadBlock, name: str, source: Slices) -> Tensor:
        """Returns a block of our tensor `name`, read with `read_hub`."""


class HubReader:
    """The weights of one folder, by canonical name; a `WeightReader`."""

    def __init__(
        self, folder: Path, read_hub: ReadBlock, layout: TensorLayout, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        """`read_hub` reads a block of a tensor on disk, in its dtype; `shapes` are those of our tensors."""
        self.folder, self.shapes = folder, shapes
        self._read_hub, self._layout = read_hub, layout

    def fill(self, target: Tensor, name: str, source: Slices, kind: str = WEIGHT) -> None:
        """Copies a block of our tensor into a tensor of its shape, of any dtype, on any device."""
        assert kind == WEIGHT, f"a Hugging Face folder holds no {kind}"
        first = source[0].start

        def copy(rows: slice) -> None:
            block = (slice(first + rows.start, first + rows.stop), *source[1:])
            target[rows].copy_(self._layout.read_own(self._read_hub, name, block))

        blocks = [rows for rows, *_ in row_blocks(tuple(target.shape), target.element_size())]
        with _in_threads(len(blocks)) as each:
            for _ in each(copy, blocks):
                pass


@contextmanager
def _in_threads(most: int) -> Iterator[Callable[..., Iterable[None]]]:
    """Maps over this rank's threads, each of which copies by itself: page faults and conversions of several blocks
    go on at a time, and none waits for another as in one copy that torch cuts up, which stalls on busy processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        threads = min(before, most, MOST_THREADS)
        if threads == 1:
            yield map
            return
        with ThreadPoolExecutor(threads) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(before)
