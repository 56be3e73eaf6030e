"""The feed-forward part of a block with experts: a router selects some for each token (Shazeer 2017; Mixtral).

In and out: hidden states `[batch, seq(/tp), hidden]`. The features of every expert are cut over the tensor-parallel
ranks, so every rank has its part of every expert and all ranks route alike. The math follows transformers'
MixtralSparseMoeBlock and Qwen3MoeSparseMoeBlock. T: tokens of the micro-batch, k: experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.parallel.collectives import (
    TensorParallel,
    enter_parallel_region,
    leave_parallel_region,
    parameter_in_parallel_region,
)
from megalite.parallel.linear import LocalLinear, linear, sharded_parameter
from megalite.parallel.shard import Shard, replicated
from models.feed_forward import gated

Move = Callable[[Tensor], Tensor]


class SparseMLP(nn.Module):
    """Router and experts. All experts enter and leave the parallel region together, in two collectives."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        assert model.num_experts is not None
        self.tp = tp
        self.gate = Router(model, tp)
        self.experts = nn.ModuleList(Expert(model, tp) for _ in range(model.num_experts))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, seq(/tp), hidden]` -> the same.

        Every expert runs, even without tokens: DeepSpeed waits for a gradient of every parameter on every rank, and
        ZeRO-3 gathers weights in the same order on all.
        """
        x = enter_parallel_region(hidden, self.tp)
        probabilities, chosen = self.gate(x)  # [batch, seq, k]
        routes = Routes.of(chosen, len(self.experts))
        inputs = _Permute.apply(x, routes.to_experts, routes.to_tokens).split(routes.counts)
        outputs = torch.cat([expert(rows) for expert, rows in zip(self.experts, inputs, strict=True)])  # [T*k, hidden]
        weighted = (outputs * probabilities.flatten()[routes.order].unsqueeze(1)).to(x.dtype)
        return leave_parallel_region(_Permute.apply(weighted, routes.to_tokens, routes.to_experts), self.tp)


class Router(nn.Module):
    """Selects the experts of each token, and the weights of their outputs."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        assert model.num_experts is not None
        self.tp, self.top_k, self.renormalizes = tp, model.num_experts_per_tok, model.norm_topk_prob
        self.weight = sharded_parameter(replicated((model.num_experts, model.hidden_size), tp.size, tp.rank, "normal"))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[batch, seq, hidden]` -> probabilities `[batch, seq, k]` in at least fp32, experts `[batch, seq, k]` int64.

        Runs inside the parallel region: inputs are bitwise equal on all ranks, so all choose the same experts; each has
        only its part of an expert's output, and so of the router's gradient.
        """
        logits = linear(x, parameter_in_parallel_region(self.weight, self.tp), None)  # [batch, seq, experts]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        probabilities, chosen = logits.softmax(dim=-1, dtype=dtype).topk(self.top_k, dim=-1)
        if self.renormalizes:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities, chosen


class Expert(nn.Module):
    """This rank's features of one gated feed-forward layer, applied to the tokens that chose it."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        size, hidden = model.moe_intermediate_size, model.hidden_size
        gate_up = (("gate_proj", size), ("up_proj", size))
        self.up_projections = LocalLinear(Shard((2 * size, hidden), 0, gate_up, tp.size, tp.rank))
        self.activation = gated(model.hidden_act)
        self.down_proj = LocalLinear(Shard((hidden, size), 1, (("", size),), tp.size, tp.rank))

    def forward(self, rows: Tensor) -> Tensor:
        """`[rows, hidden]` -> the same; under tensor parallelism one term of the sum over ranks."""
        return self.down_proj(self.activation(self.up_projections(rows)))


@dataclass(frozen=True)
class Routes:
    """Permutation between tokens and experts: a token has a row for each of its experts, grouped by expert."""

    order: Tensor  # [T * k] int64: row -> token * k + index of the choice
    inverse: Tensor  # [T * k] int64: the inverse permutation
    shape: torch.Size  # batch, seq, k
    counts: list[int]  # rows of each expert

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Routes:
        """Builds the routes for the chosen experts `[batch, seq, k]`. Synchronizes with the device for the counts."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return cls(order, inverse, chosen.shape, flat.bincount(minlength=experts).tolist())

    def to_experts(self, tokens: Tensor) -> Tensor:
        """`[batch, seq, hidden]` -> `[T * k, hidden]`."""
        return tokens.flatten(0, 1)[self.order // self.shape[-1]]

    def to_tokens(self, rows: Tensor) -> Tensor:
        """Transposes `to_experts`: `[T * k, hidden]` -> the sum of each token's rows, `[batch, seq, hidden]`."""
        return rows[self.inverse].view(*self.shape, -1).sum(dim=2)


class _Permute(torch.autograd.Function):
    """Computes `move(x)`, and its transpose for the gradient.

    Hand-written because torch's own gradient of indexing adds row by row, on a GPU in arbitrary order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move, transpose: Move) -> Tensor:
        ctx.transpose = transpose
        return move(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None
