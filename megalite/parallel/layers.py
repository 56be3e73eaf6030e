"""A model as a list of `LayerSpec`s, what its layers pass to each other, and the serial model that runs the list.

One entry is one unit of pipeline placement, of recomputation and one Hugging Face prefix. `SerialModel` runs the
list in order on one process (or on one tensor-parallel group): it is the specification that every pipelined run is
tested against, and the model that the plain DeepSpeed engine trains.

Initial weights are a pure function of (seed, canonical name, global index), the same on every layout, bit for bit. A
global tensor is drawn in blocks of rows, each block from its own counter-based stream (numpy's Philox, whose bits do
not depend on the machine), so a rank draws only the blocks it holds and never a whole tensor.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.parallel.collectives import TensorParallel
from megalite.parallel.dropout import Dropout
from megalite.parallel.shard import Shard, ShardPiece

Recompute = Literal["none", "selective", "full"]
BLOCK_ROWS = 256  # of initial weights that are drawn from one stream


class BlockInput(NamedTuple):
    """The input of every layer up to the last block.

    A named tuple, because ZeRO-3's hooks search tuples, but not dataclasses, for tensors.
    """

    hidden: Tensor  # [batch, seq/cp(/tp), hidden]; token ids [batch, seq/cp] for the first layer
    positions: Tensor | None = None  # [batch, seq] of whole sequences, 0 where a document starts; None: a row is one
    sample_ids: Tensor | None = None  # [batch], position of each sample in the data; None without dropout
    documents: int | None = None  # in the micro-batch, where the host knows their number without asking the device
    # what layers of one chunk make once for all of them, each by its own key; never sent between stages
    shared: dict[Any, Any] | None = None


@dataclass(frozen=True)
class LayerSpec:
    """Describes one layer: its name, its cost, and how to build it on this rank."""

    name: str  # prefix of its parameters' canonical names, e.g. "model.layers.3"
    build: Callable[[TensorParallel], nn.Module]
    cost: float  # forward time relative to the other entries, for balancing stages
    is_block: bool = False
    tied_to: str | None = None  # entries with the same value share one module, and so its weight
    forward: Callable[[nn.Module, Any], Any] | None = None  # instead of the module's own, for a tied entry

    @property
    def module_key(self) -> str:
        """Name of the module in a container, without dots, which torch refuses. Tied entries share it."""
        return (self.tied_to or self.name).replace(".", "/")


class CompilableBlock(nn.Module):
    """A repeated layer whose `compute`, its work on tensors, `megalite.engine.compilation` may compile."""

    recompute: Recompute = "none"
    compiled: Callable[..., Tensor] | None = None  # `compute` of the class, which takes the block as first argument

    def compute(self, *inputs: Any) -> Tensor:
        """Computes the layer; without hooks, host reads or anything else that a compiler cannot take as a whole."""
        raise NotImplementedError


MakeLayer = Callable[[LayerSpec, TensorParallel], nn.Module]


def named_layer(spec: LayerSpec, tp: TensorParallel) -> nn.Module:
    """Builds a layer with uninitialized weights and sets the canonical path of every parameter's shard."""
    module = spec.build(tp)
    module.layer_name = spec.name  # type: ignore[assignment]  # any attribute may be set on a module
    for path, parameter in module.named_parameters():
        parameter.shard = dataclasses.replace(parameter.shard, name=f"{spec.name}.{path}")  # type: ignore[attr-defined]
    return module


def make_layer(
    spec: LayerSpec,
    tp: TensorParallel,
    *,
    seed: int,
    initializer_range: float,
    place: Callable[[nn.Parameter], None] = lambda _: None,
) -> nn.Module:
    """Builds a `named_layer` with its initial weights and sets the canonical path of every dropout. `place` is given
    each parameter once it is drawn, before memory is needed for the next one."""
    module = named_layer(spec, tp)
    for parameter in module.parameters():
        initialize_(parameter, parameter.shard, seed, initializer_range)  # type: ignore[attr-defined]
        place(parameter)
    for path, part in module.named_modules():
        if isinstance(part, Dropout):
            part.set_site(seed, f"{spec.name}.{path}")
    return module


@torch.no_grad()
def initialize_(parameter: Tensor, shard: Shard, seed: int, std: float) -> None:
    """Fills `parameter` (this rank's `shard`) in place: padding with zero, the rest by the shard's initializer."""
    if shard.initializer == "ones":
        parameter.fill_(1.0)
        return
    parameter.zero_()
    if shard.initializer == "zeros":
        return
    for piece in shard.pieces():
        rows = parameter[piece.target]
        if shard.initializer == "normal":
            for at, drawn in _drawn(piece, seed, np.random.Generator.standard_normal):
                rows[at].copy_(torch.from_numpy(drawn * np.float32(std)))
        else:  # torch's kaiming_uniform_ with a = sqrt(5), as peft has it for A: up to 1 / sqrt(columns)
            for at, drawn in _drawn(piece, seed, np.random.Generator.random):
                rows[at].copy_(torch.from_numpy((2 * drawn - 1) * np.float32(piece.shape[1] ** -0.5)))


def _drawn(piece: ShardPiece, seed: int, draw: Callable[..., np.ndarray]) -> Iterator[tuple[slice, np.ndarray]]:
    """Draws the piece's part of its global tensor of random numbers, float32, by a method of numpy's generators: block
    by block, each with its rows in the piece."""
    rows, rest = piece.source[0], piece.source[1:]
    row_shape = piece.shape[1:]
    for block in range(rows.start // BLOCK_ROWS, -(-rows.stop // BLOCK_ROWS)):
        first = block * BLOCK_ROWS
        count = min(BLOCK_ROWS, piece.shape[0] - first)
        key = hashlib.blake2b(f"{seed}/{piece.name}/{block}".encode(), digest_size=16).digest()
        stream = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        drawn = draw(stream, (count, *row_shape), dtype=np.float32)
        inside = slice(max(rows.start - first, 0), min(rows.stop - first, count))
        start = first + inside.start - rows.start
        yield slice(start, start + inside.stop - inside.start), drawn[(inside, *rest)]


class SerialModel(nn.Module):
    """Runs the layers in order, as one module."""

    def __init__(self, specs: Sequence[LayerSpec], tp: TensorParallel, make_layer: MakeLayer) -> None:
        super().__init__()
        self.specs = tuple(specs)
        self.layers = nn.ModuleDict()
        for spec in specs:
            if spec.module_key not in self.layers:
                self.layers[spec.module_key] = make_layer(spec, tp)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor | None = None,
        sample_ids: Tensor | None = None,
        documents: int | None = None,
    ) -> Any:
        """Returns the last layer's output; inputs as in `BlockInput`."""
        x: Any = BlockInput(hidden, positions, sample_ids, documents, {})
        for spec in self.specs:
            module = self.layers[spec.module_key]
            x = module(x) if spec.forward is None else spec.forward(module, x)
        return x._replace(shared=None) if isinstance(x, BlockInput) else x


def named_shards(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields every parameter of a model or stage with its canonical path, tied ones once."""
    for parameter in module.parameters():
        yield parameter.shard.name, parameter  # type: ignore[attr-defined]


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """Runs `function` without keeping its activations; backward runs it again (Chen 2016).

    Non-reentrant, so that a first layer whose inputs are integers still gets gradients.
    """
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
