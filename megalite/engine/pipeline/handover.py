"""The way of gradients to DeepSpeed's plain engine, which sees nothing of a pipeline.

DeepSpeed expects pairs of `engine(...)` and `engine.backward(loss)`, one after the other. Stages compute their
forwards directly. What a backward has for DeepSpeed goes in as a *seed*: a scalar made inside `engine(...)` whose
backward passes a given gradient to an output.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.engine.deepspeed.step import backward


class _Seed(torch.autograd.Function):
    """A scalar whose backward passes on `gradient`, whatever its own gradient is: fp16's loss scale is in it."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, output: Tensor) -> Tensor:
        ctx.gradient = gradient
        return torch.zeros((), dtype=torch.float32, device=output.device)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, Tensor]:
        gradient, ctx.gradient = ctx.gradient, None
        return None, gradient


def hand_over(engine: Any, output: Tensor, gradient: Tensor | None) -> None:
    """Runs backward through a DeepSpeed engine whose model is a `Stage`, from a chunk's output with its gradient;
    without one from a loss, times fp16's loss scale."""
    seed = output.view_as if gradient is None else partial(_Seed.apply, gradient)
    backward(engine, engine(lambda: seed(output)))
