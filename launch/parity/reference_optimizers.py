"""torch's own optimizers on a reference model, one process.

Muon's matrices are those of a Hugging Face folder. A model may hold several of them in one parameter, so the
optimizer's parameters are views of the model's, each one matrix under our name of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launch.errors import LaunchError
from launch.parity.problem import Training
from launch.parity.reference_models import Model, SerialReference, as_numpy
from megalite.engine.optimizers import MOMENTS

Part = tuple[nn.Parameter, tuple[slice, ...]]  # a matrix in a parameter of the model


class ReferenceOptimizer:
    """The optimizer of a training's config: one or two of torch's, on the parameters of `model`."""

    def __init__(self, training: Training, model: Model) -> None:
        options, self._model = training.config.optimizer, model
        parts = _matrices_of_blocks(model) if options.name == "muon" else {}
        with torch.no_grad():
            self._matrices = {name: nn.Parameter(parameter[where]) for name, (parameter, where) in parts.items()}
        self._parts = parts
        taken = {parameter for parameter, _ in parts.values()}
        others = [parameter for parameter in model.module.parameters() if parameter not in taken]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in others if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in others if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._moments, self._rounds_moments = MOMENTS[options.name], options.moments_dtype == "bf16"
        self._others: torch.optim.Optimizer
        if options.name == "sgd":
            self._others = torch.optim.SGD(groups, lr=options.learning_rate)
        else:
            self._others = torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps)
        self._muon = None
        if self._matrices:
            self._muon = torch.optim.Muon(
                self._matrices.values(),
                lr=options.learning_rate,
                weight_decay=options.weight_decay,
                momentum=options.momentum,
                adjust_lr_fn=options.adjust_lr,
            )

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates the model from its parameters' gradients."""
        for name, (parameter, where) in self._parts.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self._matrices[name].grad = gradient[where]
        for optimizer in (self._others, self._muon):
            if optimizer is not None:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate
                optimizer.step()
        if self._rounds_moments:
            for optimizer in (self._others, self._muon):
                for state in optimizer.state.values() if optimizer is not None else ():
                    for kind in {*self._moments, "momentum_buffer"} & state.keys():
                        state[kind].copy_(state[kind].bfloat16())

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the moments by kind, as global arrays by canonical name."""
        state = self._others.state
        seen = {
            kind: self._model.named(lambda p, kind=kind: state[p][kind] if p in state else torch.zeros_like(p))  # type: ignore[misc]
            for kind in self._moments
        }
        for values in seen.values():
            for name in self._parts:
                del values[name]
        if self._muon is not None:
            buffers = {name: self._muon.state[matrix]["momentum_buffer"] for name, matrix in self._matrices.items()}
            seen["momentum_buffer"] = {name: as_numpy(buffer) for name, buffer in buffers.items()}
        return seen


def _matrices_of_blocks(model: Model) -> Mapping[str, Part]:
    """Returns the matrices of the blocks, except routers, by canonical name.

    Raises LaunchError for a transformers model that joins several in one parameter.
    """
    routers = {router.get_parameter("weight") for router in model.routers()}
    parameters: Sequence[nn.Parameter] = [p for p in model.module.parameters() if p not in routers]
    if isinstance(model, SerialReference):
        return {
            piece.name: (parameter, piece.target)
            for parameter in parameters
            for piece in parameter.shard.pieces()  # type: ignore[attr-defined]
            if ".layers." in piece.name and len(piece.shape) > 1
        }
    numbers = {parameter: float(number) for number, parameter in enumerate(parameters, start=1)}

    def numbered(parameter: nn.Parameter) -> Tensor:
        return torch.full_like(parameter, numbers.get(parameter, 0.0))

    parts: dict[str, Part] = {}
    for name, value in model.named(numbered).items():
        if ".layers." not in name or value.ndim < 2 or not value.flat[0]:
            continue
        parameter = parameters[int(value.flat[0]) - 1]
        if tuple(parameter.shape) != value.shape:
            raise LaunchError(
                f"transformers holds {name} in a parameter with others, or transposed, which torch's Muon would "
                "take for one matrix: use --reference self"
            )
        parts[name] = (parameter, tuple(slice(0, size) for size in value.shape))
    return parts
