"""The feed-forward part of a block with experts: a router picks some for each token (Shazeer 2017; Mixtral).

In and out: hidden states `[batch, seq(/tp), hidden]`. The features of every expert are cut over the tensor-parallel
ranks, so every rank has its part of every expert and all of them agree on who goes where. Math follows transformers'
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
    """Router and experts. All experts enter and leave the parallel region together: two collectives, however many."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        assert model.num_experts is not None
        self.tp = tp
        self.gate = Router(model, tp)
        self.experts = nn.ModuleList(Expert(model, tp) for _ in range(model.num_experts))

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, seq(/tp), hidden]` -> the same.

        Every expert runs, also on no token: DeepSpeed waits for a gradient of every parameter on every rank, and ZeRO-3
        gathers weights in the same order on all.
        """
        x = enter_parallel_region(hidden, self.tp)
        probabilities, chosen = self.gate(x)  # [batch, seq, k]
        routes = Routes.of(chosen, len(self.experts))
        given = _Moved.apply(x, routes.to_experts, routes.to_tokens).split(routes.counts)
        taken = torch.cat([expert(rows) for expert, rows in zip(self.experts, given, strict=True)])  # [T * k, hidden]
        weighted = (taken * probabilities.flatten()[routes.order].unsqueeze(1)).to(x.dtype)
        return leave_parallel_region(_Moved.apply(weighted, routes.to_tokens, routes.to_experts), self.tp)


class Router(nn.Module):
    """Which experts a token goes through, and how much each one's answer counts."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        assert model.num_experts is not None
        self.tp, self.top_k, self.renormalizes = tp, model.num_experts_per_tok, model.norm_topk_prob
        self.weight = sharded_parameter(replicated((model.num_experts, model.hidden_size), tp.size, tp.rank, "normal"))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[batch, seq, hidden]` -> probabilities `[batch, seq, k]` in fp32 at least, experts `[batch, seq, k]` int64.

        Inside the parallel region: all ranks see the same bits, and so choose alike; each knows only its part of an
        expert's answer, and so of the router's gradient.
        """
        logits = linear(x, parameter_in_parallel_region(self.weight, self.tp), None)  # [batch, seq, experts]
        dtype = torch.promote_types(logits.dtype, torch.float32)
        probabilities, chosen = logits.softmax(dim=-1, dtype=dtype).topk(self.top_k, dim=-1)
        if self.renormalizes:
            probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        return probabilities, chosen


class Expert(nn.Module):
    """One gated feed-forward layer, this rank's features of it, on the tokens that chose it."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        size, hidden = model.moe_intermediate_size, model.hidden_size
        gate_up = (("gate_proj", size), ("up_proj", size))
        self.up_projections = LocalLinear(Shard((2 * size, hidden), 0, gate_up, tp.size, tp.rank))
        self.activation = gated(model.hidden_act)
        self.down_proj = LocalLinear(Shard((hidden, size), 1, (("", size),), tp.size, tp.rank))

    def forward(self, rows: Tensor) -> Tensor:
        """`[rows, hidden]` -> the same: under tensor parallelism a part of the sum over the ranks."""
        return self.down_proj(self.activation(self.up_projections(rows)))


@dataclass(frozen=True)
class Routes:
    """Who goes where: a token is a row for each of its experts, and rows of one expert stand together."""

    order: Tensor  # [T * k] int64: row -> token * k + which of the token's choices
    inverse: Tensor  # [T * k] int64: the other way round
    shape: torch.Size  # batch, seq, k
    counts: list[int]  # rows of each expert

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Routes:
        """Of the experts `[batch, seq, k]` that the tokens chose. Waits for the device, once, for the counts."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        return cls(order, inverse, chosen.shape, flat.bincount(minlength=experts).tolist())

    def to_experts(self, tokens: Tensor) -> Tensor:
        """`[batch, seq, hidden]` -> `[T * k, hidden]`."""
        return tokens.flatten(0, 1)[self.order // self.shape[-1]]

    def to_tokens(self, rows: Tensor) -> Tensor:
        """The transpose: `[T * k, hidden]` -> for each token the sum of its rows, `[batch, seq, hidden]`."""
        return rows[self.inverse].view(*self.shape, -1).sum(dim=2)


class _Moved(torch.autograd.Function):
    """`move(x)`, and its transpose for the gradient.

    Hand-written because torch's own gradient of indexing adds row by row, on a GPU in any order.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move, transpose: Move) -> Tensor:
        ctx.transpose = transpose
        return move(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.transpose(grad), None, None
