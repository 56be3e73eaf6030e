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
from models.functional import swiglu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


class MLP(nn.Module):
    """Feed-forward part, gated (two fused projections) or plain; features are cut over the ranks."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        size, bias = model.intermediate_size, model.mlp_bias
        self.is_gated, self.is_swiglu = model.gated_mlp, model.gated_mlp and model.hidden_act == "silu"
        self.activation = ACTIVATIONS[model.hidden_act]
        sections = {"gate_proj": size, "up_proj": size} if model.gated_mlp else {"up_proj": size}
        self.up_projections = ColumnParallelLinear(model.hidden_size, sections, bias, tp)
        self.down_proj = RowParallelLinear(size, model.hidden_size, bias, tp)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, seq(/tp), hidden]` -> the same."""
        features = self.up_projections(hidden)  # [batch, seq, (2) * intermediate / tp]
        if self.is_swiglu:
            return self.down_proj(swiglu(features))
        if self.is_gated:
            gate, up = features.chunk(2, dim=-1)
            return self.down_proj(self.activation(gate) * up)
        return self.down_proj(self.activation(features))
