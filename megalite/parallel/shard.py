"""The split of one parameter over tensor-parallel ranks, recorded by the layer that splits it.

A `Shard` is enough to derive everything else about the parameter: which elements of global tensors a rank holds
(initial weights, Hugging Face import and export, checkpoints), and whether a gradient norm sums the parameter over
tensor-parallel ranks (split) or counts it once (replicated). Integer arithmetic only; imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

Initializer = Literal["normal", "zeros", "ones", "kaiming_uniform"]


@dataclass(frozen=True)
class ShardPiece:
    """One contiguous block of one global tensor, and its place in the local parameter."""

    name: str  # canonical name of the global tensor
    shape: tuple[int, ...]  # global shape, without padding
    source: tuple[slice, ...]  # block of the global tensor
    target: tuple[int | slice, ...]  # the same block inside the local parameter, behind its number in a stack


@dataclass(frozen=True)
class RangePiece:
    """A block of a global tensor whose elements lie in a range of the flattened local parameter."""

    name: str  # canonical name of the global tensor
    shape: tuple[int, ...]  # global shape, without padding
    source: tuple[slice, ...]  # block of the global tensor
    rows: slice  # part of the range: the rectangle of the local parameter that contains the block
    row_shape: tuple[int, ...]  # that rectangle's shape
    inside: tuple[slice, ...]  # the block inside the rectangle

    def of(self, numbers: Any) -> Any:
        """Returns the block as a view of a flat tensor that holds the range."""
        return numbers[self.rows].view(self.row_shape)[self.inside]


@dataclass(frozen=True)
class Shard:
    """The cut of one parameter.

    `sections` are the global sizes along `dim` of the tensors fused in this parameter (q|k|v, gate|up), each cut
    evenly over the tensor-parallel ranks, each with the name that replaces the module's own in canonical names; an
    unfused parameter has a single section without a name. A section that does not divide is padded at its end: the
    padding is zero, gets no gradient, and is never saved. `dim` None: every tensor-parallel rank holds the whole, whose
    sections are along the first dim.

    A stack is one parameter `[stacked, *shape]` of tensors that are all cut alike, such as the weights of experts. Each
    has a canonical name of its own, so initial weights, folders and checkpoints know no stacks. Its tensors may be
    dealt over expert-parallel ranks, in equal runs; one parameter then is as many of them as a rank has.
    """

    shape: tuple[int, ...]  # global, of one tensor of a stack; along `dim` the sum of the sections
    dim: int | None
    sections: tuple[tuple[str, int], ...]
    tensor_parallel_size: int
    tensor_parallel_rank: int
    initializer: Initializer = "normal"
    name: str = ""  # dotted path of the parameter from the model's root, set when its layer is built
    stacked: int | None = None  # tensors of a stack, on all ranks together; None: no stack
    expert_parallel_size: int = 1
    expert_parallel_rank: int = 0

    @property
    def is_replicated(self) -> bool:
        """True if every tensor-parallel rank holds the whole parameter, which then counts once in a norm."""
        return self.dim is None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's parameter, padding included."""
        if self.stacked is not None:
            return (len(self.numbers), *self._in_stack(0).local_shape)
        if self.dim is None:
            return self.shape
        local = sum(self._local_size(size) for _, size in self.sections)
        return (*self.shape[: self.dim], local, *self.shape[self.dim + 1 :])

    @property
    def is_dealt(self) -> bool:
        """True if other replicas hold other tensors of the stack."""
        return self.expert_parallel_size > 1

    @property
    def numbers(self) -> range:
        """The tensors of the stack that this rank holds."""
        assert self.stacked is not None
        own = self.stacked // self.expert_parallel_size
        return range(own * self.expert_parallel_rank, own * (self.expert_parallel_rank + 1))

    def _local_size(self, size: int) -> int:
        return size if self.dim is None else -(-size // self.tensor_parallel_size)

    def canonical_name(self, section: str) -> str:
        """`a.qkv.weight` with section `q_proj` -> `a.q_proj.weight`."""
        if not section:
            return self.name
        parent, leaf = self.name.rsplit(".", 2)[0], self.name.rsplit(".", 1)[1]
        return f"{parent}.{section}.{leaf}"

    def _in_stack(self, number: int) -> Shard:
        """Returns the cut of one tensor of a stack: of `a.experts.down_proj.weight`, `a.experts.5.down_proj.weight`."""
        name = self.name
        if name:
            parent, module, leaf = name.rsplit(".", 2)
            name = f"{parent}.{number}.{module}.{leaf}"
        return replace(self, stacked=None, name=name, expert_parallel_size=1, expert_parallel_rank=0)

    def pieces(self) -> Iterator[ShardPiece]:
        """Yields the blocks of global tensors that this rank holds, without padding."""
        if self.stacked is None:
            yield from self._pieces()
            return
        for place, number in enumerate(self.numbers):
            for piece in self._in_stack(number).pieces():
                yield replace(piece, target=(place, *piece.target))

    def _pieces(self) -> Iterator[ShardPiece]:
        whole = tuple(slice(0, n) for n in self.shape)
        dim, rank = (0, 0) if self.dim is None else (self.dim, self.tensor_parallel_rank)
        offset = 0
        for section, size in self.sections:
            local = self._local_size(size)
            start = min(size, rank * local)
            stop = min(size, start + local)
            shape = (*self.shape[:dim], size, *self.shape[dim + 1 :])
            if stop > start:
                yield ShardPiece(
                    self.canonical_name(section),
                    shape,
                    _replace(whole, dim, slice(start, stop)),
                    _replace(whole, dim, slice(offset, offset + stop - start)),
                )
            offset += local

    def pieces_of_range(self, start: int, stop: int) -> Iterator[RangePiece]:
        """Yields the blocks of global tensors in elements [start, stop) of the flattened local parameter, which is what
        ZeRO gives a rank. A range has ragged ends, so in a matrix it is at most three rectangles: a part of a row,
        whole rows, a part of a row."""
        if self.stacked is None:
            yield from self._pieces_of_range(start, stop)
            return
        size = math.prod(self.local_shape[1:])
        for place in range(start // size, -(-stop // size)):
            offset = place * size
            first, last = max(start, offset), min(stop, offset + size)
            for piece in self._in_stack(self.numbers[place]).pieces_of_range(first - offset, last - offset):
                rows = slice(piece.rows.start + first - start, piece.rows.stop + first - start)
                yield replace(piece, rows=rows)

    def _pieces_of_range(self, start: int, stop: int) -> Iterator[RangePiece]:
        pieces = [(piece, cast("tuple[slice, ...]", piece.target)) for piece in self._pieces()]
        offset = 0
        for rectangle in _rectangles(self.local_shape, start, stop):
            row_shape = tuple(s.stop - s.start for s in rectangle)
            size = math.prod(row_shape)
            for piece, target in pieces:
                common = [
                    slice(max(r.start, t.start), min(r.stop, t.stop)) for r, t in zip(rectangle, target, strict=True)
                ]
                if any(c.start >= c.stop for c in common):
                    continue
                yield RangePiece(
                    piece.name,
                    piece.shape,
                    tuple(
                        slice(c.start - t.start + g.start, c.stop - t.start + g.start)
                        for c, t, g in zip(common, target, piece.source, strict=True)
                    ),
                    slice(offset, offset + size),
                    row_shape,
                    tuple(slice(c.start - r.start, c.stop - r.start) for c, r in zip(common, rectangle, strict=True)),
                )
            offset += size


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    """Yields the rectangles that hold elements [start, stop) of a row-major array, in order."""
    if start >= stop:
        return
    if len(shape) == 1:
        yield (slice(start, stop),)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield (slice(first, last), *(slice(0, n) for n in shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[tuple[slice, ...]]:
    for inner in _rectangles(shape[1:], start, stop):
        yield (slice(index, index + 1), *inner)


def _replace(slices: tuple[slice, ...], dim: int, new: slice) -> tuple[slice, ...]:
    return (*slices[:dim], new, *slices[dim + 1 :])
