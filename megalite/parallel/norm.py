"""RMSNorm and LayerNorm over hidden states, whole or cut along the sequence.

In and out: `[batch, seq(/tp), hidden]`. The weights are replicated; on a cut sequence each rank sees only its
positions, so their gradients are summed over the tensor-parallel ranks here, where the cut is known.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from megalite.parallel.collectives import TensorParallel, replicated_parameter
from megalite.parallel.linear import replicated_weight


class RMSNorm(nn.Module):
    """`x / rms(x) * weight` (Zhang & Sennrich 2019)."""

    def __init__(self, hidden_size: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.eps = tp, eps
        self.weight = replicated_weight(hidden_size, tp, "ones")

    def forward(self, x: Tensor) -> Tensor:
        weight = replicated_parameter(self.weight, self.tp)
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


class LayerNorm(nn.Module):
    """`(x - mean) / std * weight + bias` (Ba 2016)."""

    def __init__(self, hidden_size: int, eps: float, tp: TensorParallel) -> None:
        super().__init__()
        self.tp, self.eps = tp, eps
        self.weight = replicated_weight(hidden_size, tp, "ones")
        self.bias = replicated_weight(hidden_size, tp, "zeros")

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = replicated_parameter(self.weight, self.tp), replicated_parameter(self.bias, self.tp)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, self.eps)
