"""The way of gradients to DeepSpeed's plain engine, which sees nothing of a pipeline.

DeepSpeed expects pairs of `engine(...)` and `engine.backward(loss)`, one after the other. Stages compute their
forwards directly. What a backward has for DeepSpeed goes in as a *seed*: a scalar made inside `engine(...)` whose
backward passes given gradients to given tensors. So its hooks see every gradient of a parameter, and sum, reduce and
shard it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.engine.deepspeed.step import backward


class _Seed(torch.autograd.Function):
    """A scalar whose backward passes on `gradients`, whatever its own gradient is: fp16's loss scale is in them."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *tensors: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), dtype=torch.float32, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return None, *gradients


class Handover:
    """Runs backward passes through a DeepSpeed engine whose model is a `Stage`."""

    def __init__(self, deepspeed_engine: Any) -> None:
        self._engine = deepspeed_engine

    def scalar(self, make: Callable[[], Tensor]) -> None:
        """Runs backward, once, from the scalar that `make` returns, which is multiplied with fp16's loss scale."""
        backward(self._engine, self._engine(make))

    def gradients(self, tensors: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Runs backward from tensors, outputs of the model or parameters, with the gradient of each."""
        self.scalar(lambda: _Seed.apply(tuple(gradients), *tensors))
