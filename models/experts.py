"""The feed-forward part of a block with experts: a router selects some for each token (Shazeer 2017; Mixtral).

In and out: hidden states `[batch, seq(/tp), hidden]`. The features of every expert are cut over the tensor-parallel
ranks, so every rank has its part of every expert and all ranks route alike. Whole experts may be dealt over replicas
besides, which send each other their tokens (`megalite.parallel.expert_dispatch`). The math follows transformers'
MixtralSparseMoeBlock, Qwen3MoeSparseMoeBlock and DeepseekV3MoE. T: tokens of the micro-batch, k: experts per token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.parallel.collectives import (
    TensorParallel,
    enter_parallel_region,
    leave_parallel_region,
    parameter_in_parallel_region,
)
from megalite.parallel.expert_balance import ExpertBalance
from megalite.parallel.expert_dispatch import through_experts
from megalite.parallel.fused_passes import HasPasses
from megalite.parallel.gradient_accumulation_fusion import wide_product
from megalite.parallel.grouped_linear import GroupedLinear, RowGroups, say_why_experts_loop, why_no_grouped_kernel
from megalite.parallel.linear import linear, sharded_parameter
from megalite.parallel.shard import Shard
from models.feed_forward import MLP, gated


class SparseMLP(HasPasses):
    """Router and experts. All experts enter and leave the parallel region together, in two collectives."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        assert model.num_experts is not None
        self.tp = tp
        self.gate = Router(model, tp)
        self.balance = ExpertBalance(model.num_experts, tp)
        self.experts = Experts(model, tp)
        self.shared_experts: MLP | None = None
        if model.n_shared_experts:
            self.shared_experts = MLP(model, tp, "none", model.shared_size)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, seq(/tp), hidden]` -> the same."""
        x = enter_parallel_region(hidden, self.tp)
        choice = self.gate(x, self.balance.bias)
        routes = Routes.of(choice.experts, self.experts.count)
        weights = self.balance(choice.weights, choice.logits, choice.scores, choice.experts, routes.ends)
        rows = _ToExperts.apply(x, routes, self.run)
        if self.tp.experts.size > 1:
            beside = partial(self._shared, hidden)
            outputs, shared = through_experts(self.experts, rows, routes.ends, self.tp.experts, beside)
        else:
            outputs, shared = self.experts(rows, routes.ends), self._shared(hidden)  # [T*k, hidden] and as the input
        routed = leave_parallel_region(_ToTokens.apply(outputs, weights, routes, self.run), self.tp)
        return routed if shared is None else routed + shared

    def _shared(self, hidden: Tensor) -> Tensor | None:
        return None if self.shared_experts is None else self.shared_experts(hidden)


class ExpertChoice(NamedTuple):
    """The experts of each token, from the router."""

    weights: Tensor  # [batch, seq, k] of the experts' outputs, in at least fp32
    experts: Tensor  # [batch, seq, k] int64
    logits: Tensor  # [batch, seq, experts]
    scores: Tensor  # of all experts, with a sum of one, in at least fp32


class Router(HasPasses):
    """Selects the experts of each token, and the weights of their outputs."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        assert model.num_experts is not None
        self.tp, self.top_k, self.renormalizes = tp, model.num_experts_per_tok, model.norm_topk_prob
        self.has_wide_logits = model.fp32_router
        self.scoring, self.scaling = model.scoring_func, model.routed_scaling_factor
        self.groups = GroupChoice(model.n_group, model.topk_group, 1 if model.group_score == "max" else 2)
        shape, whole = (model.num_experts, model.hidden_size), (("", model.num_experts),)
        self.weight = sharded_parameter(Shard(shape, None, whole, tp.size, tp.rank))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> ExpertChoice:
        """Takes `[batch, seq, hidden]`, and `[experts]` fp32 to add to scores for the choice alone, not for weights.

        Runs inside the parallel region: inputs are bitwise equal on all ranks, so all choose the same experts; each has
        only its part of an expert's output, and so of the router's gradient.
        """
        weight = parameter_in_parallel_region(self.weight, self.tp)
        is_narrow = x.dtype in (torch.bfloat16, torch.float16)
        product = _WideLogits.apply if self.has_wide_logits and is_narrow else partial(linear, bias=None)
        logits = product(x, weight)  # [batch, seq, experts]
        wide = torch.promote_types(logits.dtype, torch.float32)
        scores = logits.softmax(dim=-1, dtype=wide) if self.scoring == "softmax" else logits.to(wide).sigmoid()
        if bias is None and self.groups.chosen == self.groups.groups:
            weights, chosen = scores.topk(self.top_k, dim=-1)
        else:
            worth = scores.detach() if bias is None else scores.detach() + bias
            chosen = self.groups.within_best(worth).topk(self.top_k, dim=-1).indices
            weights = scores.gather(-1, chosen)
        if self.renormalizes:
            weights = self.run(_renormalized)(weights)
        if self.scaling != 1:
            weights = weights * self.scaling
        if self.scoring == "sigmoid":
            scores = self.run(_renormalized)(scores)
        return ExpertChoice(weights, chosen, logits, scores)


class _WideLogits(torch.autograd.Function):
    """`x W^T` in fp32 of 16-bit numbers, which are kept as they are; their gradients are rounded once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return wide_product(x.flatten(0, -2), weight.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        (x, weight), rows, weight_grad = ctx.saved_tensors, grad.flatten(0, -2), None
        if ctx.needs_input_grad[1]:
            weight_grad = (rows.t() @ x.flatten(0, -2).float()).to(weight.dtype)
        return (rows @ weight.float()).to(x.dtype).view_as(x), weight_grad


def _renormalized(weights: Tensor) -> Tensor:
    return weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)  # sigmoids may all be 0


class GroupChoice(NamedTuple):
    """Restricts the experts of a token to few groups, so that few hosts have them (DeepSeek-V2, section 2.2.2)."""

    groups: int
    chosen: int
    best: int  # experts of a group whose worth, summed, is the group's

    def within_best(self, worth: Tensor) -> Tensor:
        """Returns `worth` `[batch, seq, experts]`, minus infinity outside of each token's best groups."""
        if self.chosen == self.groups:
            return worth
        grouped = worth.unflatten(-1, (self.groups, -1))  # [batch, seq, groups, experts of a group]
        best = grouped.topk(self.best, dim=-1).values.sum(dim=-1).topk(self.chosen, dim=-1).indices
        is_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)


class Experts(HasPasses):
    """This rank's features of its experts, gated feed-forward layers, applied to the tokens that chose each.

    Over tensor-parallel ranks features are cut, and experts are not dealt: dealt ones would make every rank wait for
    the one whose experts are the most popular. Over replicas they may be, which spares memory.
    """

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        size, hidden, count = model.moe_intermediate_size, model.hidden_size, model.num_experts
        assert count is not None
        self.count = count

        def stack(shape: tuple[int, int], dim: int, sections: tuple[tuple[str, int], ...]) -> GroupedLinear:
            cut = Shard(shape, dim, sections, tp.size, tp.rank, stacked=count)
            dealt = replace(cut, expert_parallel_size=tp.experts.size, expert_parallel_rank=tp.experts.rank)
            return GroupedLinear(dealt)

        gate_up = (("gate_proj", size), ("up_proj", size))
        self.up_projections = stack((2 * size, hidden), 0, gate_up)
        self.activation = gated(model.hidden_act)
        self.down_proj = stack((hidden, size), 1, (("", size),))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """`[rows, hidden]`, grouped by expert as `ends` says -> the same; under tensor parallelism one term of the sum
        over ranks."""
        reason = why_no_grouped_kernel(rows, [self.up_projections.local_shape, self.down_proj.local_shape])
        if reason is not None and rows.device.type != "cpu":
            say_why_experts_loop(reason)
        # a rank whose dealt experts nobody chose has no row at all, for which the kernel is not asked
        groups = RowGroups.of(ends, is_one_kernel=reason is None and len(rows) > 0)
        return self.down_proj(self.run(self.activation)(self.up_projections(rows, groups)), groups)


class Routes(NamedTuple):
    """Permutation between tokens and experts: a token has a row for each of its experts, grouped by expert."""

    order: Tensor  # [batch, seq, k] int64, to be read as [T * k]: row -> token * k + index of the choice
    inverse: Tensor  # [batch, seq, k] int64: the inverse permutation, the rows of each token
    ends: Tensor  # [experts] int32: the rows of expert e end before this one

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Routes:
        """Builds the routes for the chosen experts `[batch, seq, k]`, without waiting for the device."""
        by_expert, order = chosen.flatten().sort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        numbers = torch.arange(experts, device=order.device)
        ends = torch.searchsorted(by_expert, numbers, right=True, out_int32=True)
        return cls(order.view_as(chosen), inverse.view_as(chosen), ends)


def _rows_of_tokens(tokens: Tensor, order: Tensor) -> Tensor:
    """`[batch, seq, hidden]` -> `[T * k, hidden]`, in the order of the experts."""
    return tokens.flatten(0, 1)[order.flatten() // order.shape[-1]]


def _tokens_of_rows(rows: Tensor, inverse: Tensor) -> Tensor:
    """Transposes `_rows_of_tokens`: the sum of each token's rows."""
    return rows[inverse].sum(dim=-2)


def _weighted_tokens(rows: Tensor, weights: Tensor, inverse: Tensor) -> Tensor:
    """Returns the weighted sum of each token's rows, rounded once."""
    return (rows[inverse] * weights.unsqueeze(-1)).sum(dim=-2).to(rows.dtype)


def _gradient_of_rows(grad: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    return (_rows_of_tokens(grad, order) * weights.flatten()[order.flatten()].unsqueeze(1)).to(grad.dtype)


def _gradient_of_weights(grad: Tensor, weights: Tensor, rows: Tensor, inverse: Tensor) -> Tensor:
    return (rows[inverse].to(weights.dtype) * grad.unsqueeze(-2)).sum(dim=-1)


class _ToExperts(torch.autograd.Function):
    """Copies tokens to their experts' rows.

    Hand-written because torch's own gradient of indexing adds row by row, on a GPU in arbitrary order.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, routes: Routes, run: Any) -> Tensor:
        ctx.save_for_backward(routes.inverse)
        ctx.run = run
        return run(_rows_of_tokens)(tokens, routes.order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.run(_tokens_of_rows)(grad, *ctx.saved_tensors), None, None


class _ToTokens(torch.autograd.Function):
    """Sums the rows of each token's experts with their weights `[batch, seq, k]`, in the format of these."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, routes: Routes, run: Any) -> Tensor:
        ctx.save_for_backward(rows, weights, routes.order, routes.inverse)
        ctx.run = run
        return run(_weighted_tokens)(rows, weights, routes.inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        weights_grad = ctx.run(_gradient_of_weights)(grad, weights, rows, inverse)
        return ctx.run(_gradient_of_rows)(grad, weights, order), weights_grad, None, None
