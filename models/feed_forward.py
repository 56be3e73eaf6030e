"""The feed-forward part of one block, its features cut over the tensor-parallel ranks.

In and out: hidden states `[batch, seq(/tp), hidden]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from models.fused_ops import swiglu

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


class MLP(nn.Module):
    """Feed-forward layer, gated (two fused projections) or plain; features are cut over the ranks."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        size, bias = model.intermediate_size, model.mlp_bias
        self.activation = gated(model.hidden_act) if model.gated_mlp else ACTIVATIONS[model.hidden_act]
        sections = {"gate_proj": size, "up_proj": size} if model.gated_mlp else {"up_proj": size}
        self.up_projections = ColumnParallelLinear(model.hidden_size, sections, bias, tp)
        self.down_proj = RowParallelLinear(size, model.hidden_size, bias, tp)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, seq(/tp), hidden]` -> the same."""
        features = self.up_projections(hidden)  # [batch, seq, (2) * intermediate / tp]
        return self.down_proj(self.activation(features))


def gated(hidden_act: str) -> Activation:
    """Returns the function `activation(gate) * up` of `[..., 2 * features]`, gate before up."""
    activation = ACTIVATIONS[hidden_act]

    def apply(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return activation(gate) * up

    return swiglu if hidden_act == "silu" else apply
