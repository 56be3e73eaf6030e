"""torch's own optimizers on a reference model, one process.

Muon's matrices are those of a Hugging Face folder under our names. A model may hold several of them in one parameter,
or transposed, so they are copied out of the parameters before each step and back behind it.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from launch.parity.problem import Training
from launch.reference.models import Model, as_numpy
from megalite.engine.optimizers.build import MOMENTS


class ReferenceOptimizer:
    """The optimizer of a training's config: one or two of torch's, on the parameters of `model`."""

    def __init__(self, training: Training, model: Model) -> None:
        options = training.config.optimizer
        self._moments, self._rounds_moments = MOMENTS[options.name], options.moments_dtype == "bf16"
        self._model, self._parameters = model, list(model.module.parameters())
        self._places = self._places_of_matrices() if options.name == "muon" else {}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self._parameters if p.ndim > 1], "weight_decay": options.weight_decay},
            {"params": [p for p in self._parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self._others: torch.optim.Optimizer
        if options.name == "sgd":
            self._others = torch.optim.SGD(groups, lr=options.learning_rate)
        else:
            self._others = torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps)
        self._optimizers: list[torch.optim.Optimizer] = [self._others]
        self._matrices: dict[str, nn.Parameter] = {}
        if options.name == "muon":
            weights = _joined(self._parameters)
            self._matrices = {name: nn.Parameter(weights[place]) for name, place in self._places.items()}
            muon = torch.optim.Muon(
                self._matrices.values(),
                lr=options.learning_rate,
                weight_decay=options.weight_decay,
                momentum=options.momentum,
                adjust_lr_fn=options.adjust_lr,
            )
            self._optimizers.append(muon)

    def _places_of_matrices(self) -> dict[str, Tensor]:
        """Returns the numbers of each matrix of a block, except routers, as places in all parameters joined."""
        sizes = [parameter.numel() for parameter in self._parameters]
        starts = dict(zip(self._parameters, accumulate(sizes, initial=0), strict=False))
        routers = {starts[router.get_parameter("weight")] for router in self._model.routers()}

        def places(parameter: nn.Parameter) -> Tensor:
            numbers = torch.arange(parameter.numel(), dtype=torch.float64, device=parameter.device)
            return (starts[parameter] + numbers).view(parameter.shape)

        found = {name: torch.from_numpy(value).long() for name, value in self._model.named(places).items()}
        return {
            name: place.to(self._model.device)
            for name, place in found.items()
            if ".layers." in name and place.ndim > 1 and int(place.min()) not in routers
        }

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Updates the model from its parameters' gradients."""
        if self._matrices:
            gradients = _joined([torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters])
            for name, matrix in self._matrices.items():
                matrix.grad = gradients[self._places[name]]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
            for state in optimizer.state.values() if self._rounds_moments else ():
                for kind in {*self._moments, "momentum_buffer"} & state.keys():
                    state[kind].copy_(state[kind].bfloat16())
        if self._matrices:  # over what AdamW has made of them
            weights = _joined(self._parameters)
            for name, matrix in self._matrices.items():
                weights[self._places[name]] = matrix
            for parameter, values in zip(
                self._parameters, weights.split([p.numel() for p in self._parameters]), strict=True
            ):
                parameter.copy_(values.view(parameter.shape))

    def moments(self) -> dict[str, dict[str, np.ndarray]]:
        """Returns the moments by kind, as global arrays by canonical name."""
        seen = {}
        for kind in self._moments:
            values = self._model.named(lambda parameter, kind=kind: self._others.state[parameter][kind])  # type: ignore[misc]
            seen[kind] = {name: value for name, value in values.items() if name not in self._matrices}
        if self._matrices:
            state = self._optimizers[1].state
            buffers = {name: state[matrix]["momentum_buffer"] for name, matrix in self._matrices.items()}
            seen["momentum_buffer"] = {name: as_numpy(buffer) for name, buffer in buffers.items()}
        return seen


@torch.no_grad()
def _joined(tensors: list[Any]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])
