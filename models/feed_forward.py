"""The feed-forward part of one block, its features cut over the tensor-parallel ranks.

In and out: hidden states `[batch, seq(/tp), hidden]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.fused_passes import HasPasses
from megalite.parallel.layers import Recompute
from megalite.parallel.linear import ColumnParallelLinear, Recomputable, RowParallelLinear

Activation = Callable[[Tensor], Tensor]

_gelu_tanh = partial(F.gelu, approximate="tanh")
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
}


class MLP(HasPasses):
    """Feed-forward layer, gated (two fused projections) or plain; features are cut over the ranks.

    Selective recomputation keeps the activation's input and not its output.
    """

    def __init__(self, model: ModelConfig, tp: TensorParallel, recompute: Recompute, size: int | None = None) -> None:
        """`size`: features; by default `model.intermediate_size`."""
        super().__init__()
        # relu keeps its output and not its input
        self.is_activation_kept = recompute != "selective" or not (model.gated_mlp or model.hidden_act != "relu")
        size, bias = size or model.intermediate_size, model.mlp_bias
        self.activation = gated(model.hidden_act) if model.gated_mlp else ACTIVATIONS[model.hidden_act]
        sections = {"gate_proj": size, "up_proj": size} if model.gated_mlp else {"up_proj": size}
        self.up_projections = ColumnParallelLinear(model.hidden_size, sections, bias, tp)
        self.down_proj = RowParallelLinear(size, model.hidden_size, bias, tp)

    def forward(self, hidden: Tensor | Recomputable) -> Tensor:
        """`[batch, seq(/tp), hidden]` -> the same."""
        features = self.up_projections(hidden)  # [batch, seq, (2) * intermediate / tp]
        active = self.run(self.activation)(features)
        if self.is_activation_kept or torch.compiler.is_compiling():
            return self.down_proj(active)
        return self.down_proj(Recomputable(active, self.run(self.activation), (features.detach(),)))


@lru_cache(maxsize=8)  # layers share what is compiled
def gated(hidden_act: str) -> Activation:
    """Returns the function `activation(gate) * up` of `[..., 2 * features]`, gate before up."""
    activation = ACTIVATIONS[hidden_act]

    def apply(gate_up: Tensor) -> Tensor:
        if hidden_act == "silu" and not torch.compiler.is_compiling():  # which takes no `out=`
            return _SwiGLU.apply(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return apply


class _SwiGLU(torch.autograd.Function):
    """Computes `silu(gate) * up` (Shazeer 2020), keeping only its input."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        gate_grad, up_grad = out.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=gate_grad)
        torch.mul(grad, F.silu(gate), out=up_grad)
        return out
