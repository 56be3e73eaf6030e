"""Builds the torch optimizer for DeepSpeed; DeepSpeed's own would compile kernels at start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megalite.config.sections import OptimizerConfig

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}


def build_optimizer(parameters: Iterable[nn.Parameter], options: OptimizerConfig) -> torch.optim.Optimizer:
    """Builds AdamW or SGD over two groups: matrices decay, vectors (norms and biases) do not.

    Both groups exist on every pipeline stage, since every stage holds a block: DeepSpeed's gradient norm does one
    collective per non-empty group and would wait forever for a stage with fewer (DeepSpeed#1522).
    """
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if len(p.shard.shape) > 1], "weight_decay": options.weight_decay},  # type: ignore[attr-defined]
        {"params": [p for p in parameters if len(p.shard.shape) == 1], "weight_decay": 0.0},  # type: ignore[attr-defined]
    ]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, fused=True)
