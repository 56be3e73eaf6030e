"""A linear layer that is not cut: every tensor-parallel rank holds its weight whole, and computes the tokens it has.

For narrow results that all heads read, such as the latents of `models.latent_attention`: of a cut sequence a rank
computes its slice, and what is gathered behind it is narrow too. Of a whole one all ranks compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from megalite.parallel.collectives import TensorParallel
from megalite.parallel.linear import LinearLayer, Recomputable, replicated_weight


class ReplicatedLinear(LinearLayer):
    """`y = x W^T + b`; several projections share one GEMM as `sections`. What reads y sums its gradient over ranks."""

    def __init__(self, in_features: int, sections: Mapping[str, int], bias: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp
        out, parts = sum(sections.values()), tuple(sections.items())
        self.weight = replicated_weight((out, in_features), tp, "normal", parts)
        self.bias = replicated_weight((out,), tp, "zeros", parts) if bias else None

    def forward(self, x: Tensor | Recomputable) -> Tensor:
        """`[batch, seq(/tp), in]` -> `[batch, seq(/tp), out]`."""
        return self.adapted(x, self.product(x, self.weight, self.bias))
