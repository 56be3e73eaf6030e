"""Adds balance losses to routers in training, holds the bias of their choices, and counts these.

The losses (`training.router`) are sums over sequences, so they are the same however the global batch is cut:

- sequence-wise balance (DeepSeek-V3, equations 17 to 20): the sum over experts of `f P`, where of one sequence `f` is
  the share of choices without the bias that went to the expert, times the number of experts, and `P` its mean score;
- z-loss (Zoph 2022): the mean over the tokens of a sequence of the squared logsumexp of the router's logits.

Their means over the sequences of the global batch are added to the loss, for each layer. Only their gradient exists: it
is put into backward where the router is, so that pipeline stages pass nothing on, and the loss that is shown is the
model's own. The bias and its update are in `megalite.engine.statistics.expert_bias`.

Choices are counted in backward, which runs once for each micro-batch: a forward may be one that is run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.config.sections import RouterConfig
from megalite.parallel.collectives import ContextParallel, TensorParallel, all_reduce

BIAS = "balance.bias"  # end of the canonical names of biases in checkpoints


class _WithGradientOf(torch.autograd.Function):
    """Returns `x`; backward also runs through `loss`, whose gradient is `scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor | float) -> Tensor:
        ctx.scale, ctx.dtype, ctx.device = scale, loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if isinstance(ctx.scale, Tensor):
            return grad, ctx.scale.to(ctx.dtype), None
        return grad, torch.full((), ctx.scale, dtype=ctx.dtype, device=ctx.device), None


class _CountedInBackward(torch.autograd.Function):
    """Returns `x`; backward counts the choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ends: Tensor, entropy: Tensor, counts: tuple[Tensor, Tensor]) -> Tensor:
        ctx.save_for_backward(ends, entropy)
        ctx.counts = counts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        ends, entropy = ctx.saved_tensors
        chosen, total = ctx.counts
        chosen += ends
        chosen[1:].sub_(ends[:-1])  # `-=` would write the slice back
        total += entropy
        return grad, None, None, None


class ExpertBalance(nn.Module):
    """Adds the gradients of balance losses to one router in training, holds its bias, and counts its choices."""

    def __init__(self, experts: int, tp: TensorParallel) -> None:
        super().__init__()
        self.experts, self._tp = experts, tp
        self.losses = RouterConfig()  # of the run, which the engine sets
        # of the gradient of one sequence's loss, set for each step: fp16's loss scale is in it
        self.scale: Tensor | float = 0.0
        # no buffers, which DeepSpeed would cast
        self.bias: Tensor | None = None  # [experts] fp32, added to scores where experts are chosen
        # of this step, the engine's; None: nobody counts
        self.chosen: Tensor | None = None  # [experts] int64: tokens
        self.entropy: Tensor | None = None  # fp32: sum over tokens

    def forward(self, weights: Tensor, logits: Tensor, scores: Tensor, chosen: Tensor, ends: Tensor) -> Tensor:
        """Returns `weights`, `[batch, seq/cp, k]`, with the gradients of the losses attached.

        In: the router's logits and scores `[batch, seq/cp, experts]`, the same on every tensor-parallel rank,
        chosen experts `[batch, seq/cp, k]`, and where each expert's rows end.
        """
        if not (self.training and torch.is_grad_enabled()):
            return weights
        if self.chosen is not None:
            entropy = torch.special.entr(scores.detach()).sum()
            weights = _CountedInBackward.apply(weights, ends, entropy, (self.chosen, self.entropy))
        losses: list[Tensor] = []
        if self.losses.sequence_loss:
            # equation 18 counts the best scores, whatever bias and groups make of the choice
            best = scores.topk(chosen.shape[-1], dim=-1).indices
            losses.append(self.losses.sequence_loss * sequence_balance(scores, best, self._tp.context).sum())
        if self.losses.z_loss:
            wide = logits.to(scores.dtype)
            losses.append(self.losses.z_loss * wide.logsumexp(dim=-1).square().mean(dim=1).sum())
        for loss in losses:
            # every tensor-parallel rank computes the same, and their gradients are summed; ranks that share sequences
            # compute means of their parts
            weights = _WithGradientOf.apply(weights, loss, self.scale / (self._tp.size * self._tp.context.size))
        return weights


def sequence_balance(scores: Tensor, chosen: Tensor, cp: ContextParallel) -> Tensor:
    """Returns the sequence-wise balance of each sequence, `[batch]`: 1 where experts are used equally. That of a part
    of a sequence, whose mean over the ranks that share it is the sequence's, counts the choices of all of it.

    In: scores `[batch, seq/cp, experts]` that sum to one, the experts with the best of them `[batch, seq/cp, k]`.
    """
    experts, choices = scores.shape[-1], chosen.flatten(1)  # [batch, seq * k]
    numbers = torch.arange(experts, device=chosen.device).repeat(len(choices), 1)
    ends = torch.searchsorted(choices.sort(dim=1).values, numbers, right=True)  # no sum in arbitrary order
    counts = ends.diff(dim=1, prepend=ends.new_zeros(len(ends), 1))  # [batch, experts]
    counts = all_reduce(counts, cp)
    return (counts * (experts / (choices.shape[1] * cp.size)) * scores.mean(dim=1)).sum(dim=1)


class PlacedBalance(NamedTuple):
    """The balance of one block, and where it is in the model."""

    layer: int  # number of the block
    bias_name: str  # canonical
    balance: ExpertBalance


def expert_balances(model: nn.Module) -> Iterator[PlacedBalance]:
    """Yields the balance of each block with experts."""
    for layer in model.modules():
        name = getattr(layer, "layer_name", None)  # set by `make_layer`
        if isinstance(name, str):
            for path, part in layer.named_modules():
                if isinstance(part, ExpertBalance):
                    yield PlacedBalance(
                        int(name.rsplit(".", 1)[1]), name + "." + path.removesuffix("balance") + BIAS, part
                    )
