"""How a layer cut one of its parameters, written down by the layer that cut it.

A `Shard` is enough to derive everything else about the parameter: which global numbers a rank holds (initial
weights, Hugging Face import, checkpoint reshape), what to write back, and whether the parameter counts once or on
every tensor-parallel rank in a gradient norm. Pure integers, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Initializer = Literal["normal", "zeros", "ones"]


@dataclass(frozen=True)
class Piece:
    """One contiguous block of one global tensor, and where it lies in the local parameter."""

    name: str  # canonical name of the global tensor
    shape: tuple[int, ...]  # global shape, without padding
    source: tuple[slice, ...]  # block of the global tensor
    target: tuple[slice, ...]  # the same block inside the local parameter


@dataclass(frozen=True)
class Shard:
    """The cut of one parameter.

    `sections` are the global sizes along `dim` of the tensors fused in this parameter (q|k|v, gate|up), each cut
    evenly over the tensor-parallel ranks, each with the name that replaces the module's own in canonical names; an
    unfused parameter has a single section without a name. A section that does not divide is padded at its end: the
    padding is zero, gets no gradient, and is never saved. `dim` None: every tensor-parallel rank holds the same whole.
    """

    shape: tuple[int, ...]  # global; along `dim` the sum of the sections
    dim: int | None
    sections: tuple[tuple[str, int], ...]
    tensor_parallel_size: int
    tensor_parallel_rank: int
    initializer: Initializer = "normal"
    name: str = ""  # dotted path of the parameter from the model's root, set when its layer is built

    @property
    def is_replicated(self) -> bool:
        """True where every tensor-parallel rank holds the whole parameter: it counts once in a norm."""
        return self.dim is None

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's parameter, padding included."""
        if self.dim is None:
            return self.shape
        local = sum(self._local_size(size) for _, size in self.sections)
        return (*self.shape[: self.dim], local, *self.shape[self.dim + 1 :])

    def _local_size(self, size: int) -> int:
        return -(-size // self.tensor_parallel_size)

    def canonical_name(self, section: str) -> str:
        """`a.qkv.weight` with section `q_proj` -> `a.q_proj.weight`."""
        if not section:
            return self.name
        parent, leaf = self.name.rsplit(".", 2)[0], self.name.rsplit(".", 1)[1]
        return f"{parent}.{section}.{leaf}"

    def pieces(self) -> Iterator[Piece]:
        """The blocks of global tensors that this rank holds, padding left out."""
        whole = tuple(slice(0, n) for n in self.shape)
        if self.dim is None:
            yield Piece(self.name, self.shape, whole, whole)
            return
        offset = 0
        for section, size in self.sections:
            local = self._local_size(size)
            start = min(size, self.tensor_parallel_rank * local)
            stop = min(size, start + local)
            shape = (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])
            if stop > start:
                yield Piece(
                    self.canonical_name(section),
                    shape,
                    _replace(whole, self.dim, slice(start, stop)),
                    _replace(whole, self.dim, slice(offset, offset + stop - start)),
                )
            offset += local


def _replace(slices: tuple[slice, ...], dim: int, new: slice) -> tuple[slice, ...]:
    return (*slices[:dim], new, *slices[dim + 1 :])


def replicated(
    shape: tuple[int, ...], tensor_parallel_size: int, tensor_parallel_rank: int, initializer: Initializer
) -> Shard:
    """A parameter of which every tensor-parallel rank holds the whole."""
    return Shard(shape, None, (("", shape[0]),), tensor_parallel_size, tensor_parallel_rank, initializer)
