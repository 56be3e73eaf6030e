"""Low-rank adapters of the parallel linear layers (LoRA, Hu 2021), cut over the tensor-parallel ranks as these are.

In: the layers of a model as specs, and `config.adapter`. Out: specs whose modules are frozen but for two factors
beside each target, A `[rank, in]` and B `[out, rank]`: `y = x W^T + alpha / rank * (x A^T) B^T`. Projections that share
a product, such as q, k and v, have factors of their own, stacked in one parameter.

- Column-parallel: A is whole on every rank and B cut by rows. x A^T has `rank` numbers per token, and enters the
  parallel region instead of x: a cut sequence is gathered behind A, and backward sums over ranks before it. So A is
  used on a rank's slice of the sequence, as a norm's weight is, and its gradient is whole where the sequence is.
- Replicated: the same without a cut, and nothing enters the parallel region here: B is as whole as A.
- Row-parallel: A is cut by columns and B whole on every rank. What they add is a part of the layer's own sum over
  ranks. Each rank has a part of x A^T, and so of the gradient of B, whether or not the sequence is cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megalite.config.sections import AdapterConfig
from megalite.parallel.collectives import TensorParallel, gathered_slices
from megalite.parallel.layers import LayerSpec
from megalite.parallel.linear import (
    ONE_RANK,
    ColumnParallelLinear,
    Recomputable,
    RowParallelLinear,
    linear,
    replicated_weight,
    sharded_parameter,
)
from megalite.parallel.replicated_linear import ReplicatedLinear
from megalite.parallel.shard import Shard

FACTORS = ("lora_A", "lora_B")  # last part of the canonical names of adapters' parameters


def is_factor(name: str) -> bool:
    """Returns whether a canonical name is that of an adapter's parameter."""
    return name.endswith(tuple(f".{factor}" for factor in FACTORS))


def with_adapters(specs: Sequence[LayerSpec], adapter: AdapterConfig) -> list[LayerSpec]:
    """Returns specs of the same layers with adapters; without any, if there are to be none, the layers as they are."""
    if adapter.name == "none":
        return list(specs)
    return [dataclasses.replace(spec, build=partial(_adapted, adapter, spec.build)) for spec in specs]


def _adapted(adapter: AdapterConfig, build: Callable[[TensorParallel], nn.Module], tp: TensorParallel) -> nn.Module:
    module = build(tp).requires_grad_(False)
    for path, layer in module.named_modules():
        if isinstance(layer, ColumnParallelLinear | ReplicatedLinear):
            _adapt_columns(layer, adapter)
        elif isinstance(layer, RowParallelLinear) and adapter.adapts(path.rpartition(".")[2]):
            _adapt_rows(layer, adapter)
    return module


def _adapt_columns(layer: ColumnParallelLinear | ReplicatedLinear, adapter: AdapterConfig) -> None:
    tp, rank, is_whole = layer.tp, adapter.rank, isinstance(layer, ReplicatedLinear)
    shard: Shard = layer.weight.shard  # type: ignore[attr-defined]
    sections = tuple(section for section in shard.sections if adapter.adapts(section[0]))
    if not sections:
        return
    in_features, out_features = shard.shape[1], sum(size for _, size in sections)
    stacked = tuple((name, rank) for name, _ in sections)
    layer.lora_A = replicated_weight((len(sections) * rank, in_features), tp, "kaiming_uniform", stacked)
    if is_whole:
        layer.lora_B = replicated_weight((out_features, rank), tp, "zeros", sections)
    else:
        layer.lora_B = sharded_parameter(Shard((out_features, rank), 0, sections, tp.size, tp.rank, "zeros"))
    parts = 1 if is_whole else tp.size
    outputs = tuple((-(-size // parts), adapter.adapts(name)) for name, size in shard.sections)
    layer.adapter = LowRankAdapter(adapter.alpha / rank, ONE_RANK if is_whole else tp, outputs, is_row_parallel=False)


def _adapt_rows(layer: RowParallelLinear, adapter: AdapterConfig) -> None:
    tp, rank = layer.tp, adapter.rank
    shard: Shard = layer.weight.shard  # type: ignore[attr-defined]
    out_features, in_features = shard.shape
    layer.lora_A = sharded_parameter(Shard((rank, in_features), 1, shard.sections, tp.size, tp.rank, "kaiming_uniform"))
    in_part = dataclasses.replace(tp, sequence_parallel=True)  # a rank has a part of B's gradient, as of a cut sequence
    layer.lora_B = replicated_weight((out_features, rank), in_part, "zeros")
    outputs = ((out_features, True),)
    layer.adapter = LowRankAdapter(adapter.alpha / rank, in_part, outputs, is_row_parallel=True)


@dataclasses.dataclass(frozen=True)
class LowRankAdapter:
    """Adds what one layer's factors make of its input to its product."""

    scale: float
    tp: TensorParallel  # with which the factor is replicated that every rank holds whole: A, or B if row-parallel
    outputs: tuple[tuple[int, bool], ...]  # local features of each projection, and whether it has factors
    is_row_parallel: bool

    def __call__(self, x: Tensor | Recomputable, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Returns y with `scale * (x A^T) B^T` added in place, both in the order of `stacked_slices`.

        x is the layer's input, as it is given to its product; y `[..., local features]`, not summed over ranks yet.
        """
        inner = linear(x, a, None)
        if not self.is_row_parallel:
            inner = gathered_slices(inner, self.tp)
        return y.add_(linear(inner, self._by_projection(b), None), alpha=self.scale)

    def _by_projection(self, b: Tensor) -> Tensor:
        """Returns `[local features, stacked ranks]`: each projection's rows of b, of its own columns of x A^T only."""
        if len(self.outputs) == 1:
            return b
        rows = iter(b.split([features for features, has_factors in self.outputs if has_factors]))
        return torch.block_diag(
            *(next(rows) if has_factors else b.new_empty(features, 0) for features, has_factors in self.outputs)
        )
