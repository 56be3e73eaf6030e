"""AdamW on flat partitions, with moments in fp32 or bf16.

torch's fused AdamW wants weights, gradients and moments in one format. Moments in bf16 are therefore widened a piece at
a time, on a CPU so small that it stays in the cache, stepped on by the fused kernel, and rounded to the nearest:
of the 28 bytes per number that an fp32 step moves 8 are saved, and half the memory of the moments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megalite.config.sections import OptimizerConfig
from megalite.engine.stages import TORCH_DTYPES

# numbers: two moments of them fit half a megabyte of cache; on a GPU they take 256 MiB, as of a piece that fits an L2
# cache the host starts the six kernels more slowly than the GPU runs them
WIDENED_AT_ONCE = {"cpu": 1 << 16, "cuda": 1 << 25}


class CompactAdamW(torch.optim.Optimizer):
    """AdamW by torch's fused kernel, whose moments may have another format than the weights.

    As torch's fused optimizers do, it divides gradients by `grad_scale`, and changes nothing where `found_inf` is 1.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, groups: Iterable[dict[str, Any]], options: OptimizerConfig) -> None:
        self.moments_dtype = TORCH_DTYPES[options.moments_dtype]
        super().__init__(groups, {"lr": options.learning_rate, "betas": options.betas, "eps": options.eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Updates every partition that has a gradient; there is no closure."""
        assert closure is None
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is not None:
                    self.update(group, weights)

    def create_state(self, weights: Tensor, step_count: int = 0) -> dict[str, Tensor]:
        """Creates zero moments for a partition after so many steps."""
        state = self.state[weights]
        state["step"] = torch.tensor(float(step_count), device=weights.device)
        for name in ("exp_avg", "exp_avg_sq"):
            state[name] = torch.zeros_like(weights, dtype=self.moments_dtype)
        return state

    def update(self, group: dict[str, Any], weights: Tensor) -> None:
        """Updates one partition from its gradient, of the same shape."""
        state = self.state[weights] or self.create_state(weights)
        is_whole = self.moments_dtype == torch.float32
        size = weights.numel() if is_whole else WIDENED_AT_ONCE[weights.device.type]
        assert weights.grad is not None
        tensors = (weights, weights.grad, state["exp_avg"], state["exp_avg_sq"])
        beta1, beta2 = group["betas"]
        options: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "amsgrad": False, "maximize": False, "fused": True}
        options |= {name: group[name] for name in ("lr", "weight_decay", "eps")}
        options |= {"grad_scale": self.grad_scale, "found_inf": self.found_inf}
        step = state["step"]
        for weight, gradient, first, second in zip(*(tensor.split(size) for tensor in tensors), strict=True):
            widened, count = (first.float(), second.float()), step.clone()  # the kernel counts a step for each piece
            adamw([weight], [gradient], [widened[0]], [widened[1]], [], [count], **options)
            first.copy_(widened[0])
            second.copy_(widened[1])
        step.copy_(count)
