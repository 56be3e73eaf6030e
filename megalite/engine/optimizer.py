"""The torch optimizer handed to DeepSpeed: our own object, so that nothing is compiled at start."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from megalite.config import OptimizerConfig

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}


class _NeverCompiled(torch.optim.Optimizer):
    """An optimizer whose construction does not import torch's compiler: 2 s of CPU and 130 MB on every rank.

    torch guards these methods from its compiler with a decorator (`torch._disable_dynamo`) that imports it to do so.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(_NeverCompiled, torch.optim.AdamW):
    """torch's."""


class SGD(_NeverCompiled, torch.optim.SGD):
    """torch's."""


def build_optimizer(parameters: Iterable[nn.Parameter], options: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW or SGD over two groups: matrices decay, vectors (norms and biases) do not.

    Both groups exist on every pipeline stage, since every stage holds a block: DeepSpeed's gradient norm does one
    collective per non-empty group and would wait forever for a stage with fewer (DeepSpeed#1522).
    """
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if len(p.shard.shape) > 1], "weight_decay": options.weight_decay},  # type: ignore[attr-defined]
        {"params": [p for p in parameters if len(p.shard.shape) == 1], "weight_decay": 0.0},  # type: ignore[attr-defined]
    ]
    if options.name == "sgd":
        return SGD(groups, lr=options.learning_rate)
    return AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, fused=True)
