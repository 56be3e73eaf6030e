"""The layout of our weights in the tensors of a Hugging Face folder, as one table of integers for both directions.

A `RowRun` identifies rows of one of our tensors with rows of a tensor on disk. That covers renamed weights (one run),
fused ones (`qkv_proj`: a run per part), ones fused head by head (GPT-NeoX: runs as long as a head) and transposed ones
(GPT-2's Conv1D). Import reads blocks of our tensors, export blocks of theirs; both read only the rows of the block.
`hub_layout` builds the table of a whole model from a family's names of weights: dotted paths, of which a family's data
names parts, e.g. `mlp.up_proj` or `model.layers`. This module knows names and rows only, no files, dtypes or families.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor  # for annotations only: commands use the families without importing torch

Shape = tuple[int, ...]
Slices = tuple[slice, ...]
Read = Callable[[str, Slices], "Tensor"]
"""Returns a block of the tensor with a name, given by one slice with start and stop for each dimension."""


@dataclass(frozen=True)
class RowRun:
    """`count` consecutive rows of one of our tensors that are consecutive rows of a hub tensor."""

    name: str  # canonical name of our tensor
    own: int  # first row in our tensor
    hub: int  # first row in the hub tensor
    count: int


@dataclass(frozen=True)
class HubTensor:
    """One tensor on disk. `runs` are in order of its rows, and cover each of them once."""

    name: str
    shape: Shape
    runs: tuple[RowRun, ...]
    transposed: bool = False  # disk is [in, out], as GPT-2's Conv1D; the rows of `runs` are along out

    @property
    def row_dim(self) -> int:
        """The dimension of the disk tensor along which our rows lie."""
        return 1 if self.transposed else 0


@dataclass(frozen=True)
class _Part:
    """Rows of one run inside a requested block."""

    run: RowRun
    tensor: HubTensor
    own_rows: slice  # of our tensor
    hub_rows: slice  # the same rows of the hub tensor
    offset: int  # first row in the block
    count: int


class HubLayout:
    """All tensors of one model on disk; every row of ours and of theirs is in exactly one run."""

    tensors: Mapping[str, HubTensor]
    """Hub name -> tensor, in the order in which a folder holds them."""

    def __init__(self, tensors: Iterable[HubTensor], shapes: Mapping[str, Shape]) -> None:
        """`shapes`: shapes of our tensors by canonical name."""
        listed = list(tensors)
        self.tensors = {tensor.name: tensor for tensor in listed}
        assert len(self.tensors) == len(listed), "two tensors of a folder have one name"
        self._places: dict[str, list[tuple[RowRun, HubTensor]]] = {name: [] for name in shapes}
        for tensor in listed:
            for run in tensor.runs:
                self._places[run.name].append((run, tensor))
            _assert_whole(tensor.name, tensor.shape[tensor.row_dim], ((run.hub, run.count) for run in tensor.runs))
        for name, places in self._places.items():
            places.sort(key=lambda place: place[0].own)
            _assert_whole(name, shapes[name][0], ((run.own, run.count) for run, _ in places))
            for _, tensor in places:
                theirs = tensor.shape[::-1] if tensor.transposed else tensor.shape
                assert theirs[1:] == shapes[name][1:], f"{tensor.name} {tensor.shape} holds {name} {shapes[name]}"

    def hub_names(self, name: str) -> tuple[str, ...]:
        """Returns the hub tensors that hold our tensor `name`, in order of its rows."""
        return tuple(dict.fromkeys(tensor.name for _, tensor in self._places[name]))

    def read_own(self, read_hub: Read, name: str, source: Slices) -> Tensor:
        """Returns a block of our tensor `name`: the result of `read_hub` (possibly transposed) if the block is in one
        run, else a new tensor."""
        parts = _parts(self._places[name], source[0], lambda run: run.own)

        def block(part: _Part) -> Tensor:
            if part.tensor.transposed:
                return read_hub(part.tensor.name, (source[1], part.hub_rows)).t()
            return read_hub(part.tensor.name, (part.hub_rows, *source[1:]))

        return _joined(parts, block, 0, source)

    def read_hub(self, read_own: Read, name: str, source: Slices) -> Tensor:
        """Returns a block of the hub tensor `name`: the result of `read_own` (possibly transposed) if the block is in
        one run, else a new tensor."""
        tensor = self.tensors[name]
        parts = _parts(((run, tensor) for run in tensor.runs), source[tensor.row_dim], lambda run: run.hub)

        def block(part: _Part) -> Tensor:
            if tensor.transposed:
                return read_own(part.run.name, (part.own_rows, source[0])).t()
            return read_own(part.run.name, (part.own_rows, *source[1:]))

        return _joined(parts, block, tensor.row_dim, source)


def _parts(
    places: Iterable[tuple[RowRun, HubTensor]], rows: slice, start_of: Callable[[RowRun], int]
) -> Iterator[_Part]:
    """Yields the runs that hold `rows`, restricted to these rows."""
    for run, tensor in places:
        start = start_of(run)
        first, stop = max(rows.start, start), min(rows.stop, start + run.count)
        if first < stop:
            own, hub = (slice(begin + first - start, begin + stop - start) for begin in (run.own, run.hub))
            yield _Part(run, tensor, own, hub, first - rows.start, stop - first)


def _joined(parts: Iterator[_Part], block: Callable[[_Part], Tensor], dim: int, source: Slices) -> Tensor:
    """Returns the requested block; besides it, only one part is in memory at a time."""
    whole: Tensor | None = None
    size = source[dim].stop - source[dim].start
    for part in parts:
        numbers = block(part)
        if part.count == size:
            return numbers
        if whole is None:
            whole = numbers.new_empty([s.stop - s.start for s in source])
        whole.narrow(dim, part.offset, part.count).copy_(numbers)
    assert whole is not None, f"no rows in {source}"
    return whole


def _assert_whole(name: str, rows: int, runs: Iterable[tuple[int, int]]) -> None:
    """Asserts that runs (first row, count) cover all rows in order without gaps or overlaps."""
    stop = 0
    for first, count in runs:
        assert first == stop and count > 0, f"{name}: a run begins at row {first}, the one before ends at {stop}"
        stop = first + count
    assert stop == rows, f"{name}: runs cover {stop} of {rows} rows"


def hub_layout(
    shapes: Mapping[str, Shape],
    renamed: Mapping[str, str],
    fused: Mapping[str, tuple[str, ...]],
    transposed: tuple[str, ...],
    heads: int | None,
) -> HubLayout:
    """Returns the tensors on disk of a model whose weights have `shapes` by canonical name.

    renamed: part of a path -> the hub's part. fused: the hub's part -> our parts whose rows it concatenates; with
    `heads` it interleaves that many heads of each. transposed: the hub's parts whose matrices are [in, out].
    """
    parts = {part: (whole, members) for whole, members in fused.items() for part in members}
    tensors: dict[str, HubTensor] = {}
    for name in shapes:
        whole, names = _fused_with(name, parts)
        hub_name = _replaced(whole, renamed)
        if names[0] != name:  # a later part of a fused tensor
            continue
        assert hub_name not in tensors, f"two weights are called {hub_name}"
        runs = tuple(_runs({part: shapes[part][0] for part in names}, heads if len(names) > 1 else None))
        shape = (sum(run.count for run in runs), *shapes[name][1:])
        is_transposed = len(shape) == 2 and hub_name.rsplit(".", 1)[0].endswith(tuple(f".{end}" for end in transposed))
        tensors[hub_name] = HubTensor(hub_name, shape[::-1] if is_transposed else shape, runs, is_transposed)
    return HubLayout(tensors.values(), shapes)


def _fused_with(name: str, parts: Mapping[str, tuple[str, tuple[str, ...]]]) -> tuple[str, list[str]]:
    """Returns the name of the tensor that holds `name`, and the canonical names of everything in it."""
    path, leaf = name.rsplit(".", 1)
    for part, (whole, members) in parts.items():
        if path.endswith(f".{part}"):
            block = path.removesuffix(part)
            return f"{block}{whole}.{leaf}", [f"{block}{member}.{leaf}" for member in members]
    return name, [name]


def _runs(rows: Mapping[str, int], heads: int | None) -> Iterator[RowRun]:
    """Yields the rows of a tensor that holds several of ours, whole or head by head."""
    hub, pieces = 0, heads or 1
    for piece in range(pieces):
        for name, count in rows.items():
            assert count % pieces == 0, f"{name}: {count} rows are not {pieces} heads"
            yield RowRun(name, piece * (count // pieces), hub, count // pieces)
            hub += count // pieces


def _replaced(name: str, renamed: Mapping[str, str]) -> str:
    if not renamed:
        return name
    longest_first = sorted(renamed, key=len, reverse=True)
    part = re.compile(rf"(?<![^.])({'|'.join(map(re.escape, longest_first))})(?![^.])")
    return part.sub(lambda found: renamed[found[0]], name)
