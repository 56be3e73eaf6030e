"""Muon (Jordan 2024; Liu 2025) on the partitions of ZeRO-1 and ZeRO-2: momentum whose matrices are made orthogonal.

In: this rank's flat partitions of weights and gradients, and which matrices lie where in the buckets that replicas cut
into them. A matrix is one of Hugging Face's: q, k and v, or gate and up, each for itself although they are sections of
one parameter, and each expert of a stack. What is no matrix of a block is stepped on by AdamW.

Momentum is elementwise, on the own partition. Its update is gathered in bf16, the format in which it is made orthogonal
anyway: a bucket over the replicas, and of that the matrices that overlap the own partition over the tensor-parallel
ranks. Each rank makes those whole matrices orthogonal and takes its own numbers of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config.sections import OptimizerConfig
from megalite.engine.deepspeed.internals import FlatGroup
from megalite.engine.optimizers.adamw import CompactAdamW
from megalite.parallel.collectives import ALL_GATHER, TensorParallel, all_gather
from megalite.parallel.linear import lacks_fast_gemm
from megalite.parallel.shard import RangePiece, Shard, ShardPiece

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic iteration, steepest at zero: Jordan 2024, and torch
ITERATIONS = 5
SMALLEST_NORM = 1e-7
STACKED_AT_ONCE = 1 << 26  # numbers of equally large matrices in one batch of products


def is_orthogonalized(shard: Shard) -> bool:
    """Returns whether Muon makes a parameter orthogonal: matrices of blocks, except routers, which are not cut."""
    return ".layers." in shard.name and len(shard.shape) > 1 and not shard.is_replicated


def rate_factor(shape: Sequence[int], adjust_lr: str) -> float:
    """Returns the factor on the learning rate of a matrix `[rows, columns]`, as `torch.optim.Muon` has it."""
    rows, columns = shape
    return 0.2 * sqrt(max(rows, columns)) if adjust_lr == "match_rms_adamw" else sqrt(max(1.0, rows / columns))


@dataclass(frozen=True)
class MatrixSource:
    """One block of a global matrix, in the numbers that the tensor-parallel ranks have gathered."""

    tensor_rank: int
    start: int  # of the parameter, in the gathered range
    shape: tuple[int, ...]  # of the parameter
    piece: ShardPiece


@dataclass(frozen=True)
class OwnPartition:
    """The matrices that overlap this rank's partition of a bucket."""

    gathered: slice  # of the bucket: the parameters that overlap the partition, whole
    sources: list[MatrixSource]
    own: list[tuple[slice, RangePiece]]  # of the partition; its blocks of global matrices

    @classmethod
    def of(cls, group: FlatGroup, rank: int, replicas: int) -> OwnPartition:
        """Looks the matrices of a bucket up, for the partition number `rank` of `replicas`."""
        length = len(group.weights) // replicas
        first, last = rank * length, (rank + 1) * length
        placed = sorted(((group.start(p), p) for p in group.parameters), key=lambda place: place[0])
        places = [(start, p) for start, p in placed if start < last and start + p.numel() > first]
        gathered = slice(places[0][0], places[-1][0] + places[-1][1].numel()) if places else slice(0, 0)
        sources, own = [], []
        for start, parameter in places:
            shard: Shard = parameter.shard  # type: ignore[attr-defined]
            begin, end = max(start, first), min(start + parameter.numel(), last)
            own += [
                (slice(begin - first, end - first), piece)
                for piece in shard.pieces_of_range(begin - start, end - start)
            ]
            sources += [
                MatrixSource(tensor_rank, start - gathered.start, shard.local_shape, piece)
                for tensor_rank in range(shard.tensor_parallel_size)
                for piece in replace(shard, tensor_parallel_rank=tensor_rank).pieces()
            ]
        names = {piece.name for _, piece in own}
        return cls(gathered, [source for source in sources if source.piece.name in names], own)

    def matrices(self, updates: Tensor) -> dict[str, Tensor]:
        """Returns the whole matrices that overlap the partition, by name, without padding.

        `updates` `[tensor_parallel_size, numbers]` are all ranks' numbers of `gathered`.
        """
        whole: dict[str, Tensor] = {}
        for source in self.sources:
            piece = source.piece
            local = updates[source.tensor_rank, source.start : source.start + prod(source.shape)].view(source.shape)
            if len(updates) == 1:
                whole[piece.name] = local[piece.target]
                continue
            if piece.name not in whole:
                whole[piece.name] = updates.new_empty(piece.shape)
            whole[piece.name][piece.source] = local[piece.target]
        return whole


class Muon(CompactAdamW):
    """Muon for the groups of matrices `is_orthogonalized`, AdamW for the others.

    `connect` must be called once the groups hold flat partitions.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], options: OptimizerConfig) -> None:
        super().__init__(groups, options)
        self._momentum, self._adjust_lr = options.momentum, options.adjust_lr
        self._partitions: dict[Tensor, OwnPartition] = {}
        self._replicas: dist.ProcessGroup
        self._tensor_parallel = TensorParallel()

    def connect(self, groups: Sequence[FlatGroup], replicas: dist.ProcessGroup, tp: TensorParallel) -> None:
        """Says which matrices the flat partitions hold; `groups` are those of `param_groups`, in their order."""
        rank, count = dist.get_rank(replicas), dist.get_world_size(replicas)
        self._replicas, self._tensor_parallel = replicas, tp
        for group, flat in zip(self.param_groups, groups, strict=True):
            if group.get("is_orthogonalized"):
                self._partitions[group["params"][0]] = OwnPartition.of(flat, rank, count)

    def create_state(self, weights: Tensor, step_count: int = 0) -> dict[str, Tensor]:
        if weights not in self._partitions:
            return super().create_state(weights, step_count)
        state = self.state[weights]
        state["momentum_buffer"] = torch.zeros_like(weights, dtype=self.moments_dtype)
        return state

    def update(self, group: dict[str, Any], weights: Tensor) -> None:
        if weights not in self._partitions:
            super().update(group, weights)
            return
        taken: Tensor | float = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        mine = self._partitions[weights]
        updates = self._gathered(self._update_of_momentum(weights, taken), mine)
        matrices = orthogonalized(mine.matrices(updates))
        rate = group["lr"]
        weights.mul_(1.0 - rate * group["weight_decay"] * taken)
        for where, piece in mine.own:
            update = matrices[piece.name][piece.source]
            piece.of(weights[where]).add_(update, alpha=-rate * rate_factor(piece.shape, self._adjust_lr))

    def _update_of_momentum(self, weights: Tensor, taken: Tensor | float) -> Tensor:
        """Adds the gradient to the momentum and returns Nesterov's update in bf16; zero in a step that is not taken."""
        assert weights.grad is not None
        state, gradient = self.state[weights] or self.create_state(weights), weights.grad
        if self.grad_scale is not None:
            gradient = gradient / self.grad_scale
        if self.found_inf is not None:
            gradient = gradient.masked_fill(self.found_inf.bool(), 0.0)  # no number times zero would do
        momentum = state["momentum_buffer"].float()
        momentum.lerp_(gradient, (1.0 - self._momentum) * taken)
        state["momentum_buffer"].copy_(momentum)
        return (gradient.lerp(momentum, self._momentum) * taken).bfloat16()

    def _gathered(self, update: Tensor, mine: OwnPartition) -> Tensor:
        """Returns all tensor-parallel ranks' numbers of `mine.gathered`, `[tensor_parallel_size, numbers]`."""
        replicas, tp = dist.get_world_size(self._replicas), self._tensor_parallel
        if replicas > 1:
            whole = update.new_empty(replicas * len(update))
            getattr(dist, ALL_GATHER)(whole, update, group=self._replicas)
            update = whole
        update = update[mine.gathered]
        return (all_gather(update, tp, dim=0) if len(update) else update).view(tp.size, -1)


def orthogonalized(matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Makes matrices in bf16 nearly orthogonal; equally large ones, tall and wide, in one batch."""
    alike: dict[tuple[int, int], list[str]] = defaultdict(list)
    for name, matrix in matrices.items():
        alike[min(matrix.shape), max(matrix.shape)].append(name)
    results: dict[str, Tensor] = {}
    for shape, names in alike.items():
        at_once = max(1, STACKED_AT_ONCE // prod(shape))
        for first in range(0, len(names), at_once):
            batch = names[first : first + at_once]
            wide = [matrices[name] if matrices[name].shape == shape else matrices[name].mT for name in batch]
            for name, matrix in zip(batch, newton_schulz(torch.stack(wide)), strict=True):
                results[name] = matrix if matrices[name].shape == shape else matrix.mT
    return results


def newton_schulz(matrices: Tensor) -> Tensor:
    """Moves all singular values of `[n, rows, columns]`, rows <= columns, to about 1: between 0.7 and 1.2 or so.

    Each product is rounded to bf16 once, also where a CPU without bf16 units multiplies in fp32.
    """
    a, b, c = COEFFICIENTS
    x = matrices / torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True).clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = _product(x, x.mT)
        polynomial = _product(gram, gram, added=gram, beta=b, alpha=c)
        x = _product(polynomial, x, added=x, beta=a)
    return x


def _product(x: Tensor, y: Tensor, *, added: Tensor | None = None, beta: float = 0.0, alpha: float = 1.0) -> Tensor:
    """Returns `beta * added + alpha * x y` of batches of matrices, rounded once."""
    is_widened = lacks_fast_gemm(x)
    if is_widened:
        x, y, added = x.float(), y.float(), None if added is None else added.float()
    result = torch.bmm(x, y) if added is None else torch.baddbmm(added, x, y, beta=beta, alpha=alpha)
    return result.bfloat16() if is_widened else result
