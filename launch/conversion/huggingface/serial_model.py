"""Our decoder on one process: the shapes of its weights, and the model filled with stored ones."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalite.checkpoint.manifest import Slices
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.expert_balance import expert_balances
from megalite.parallel.layers import LayerSpec, SerialModel, named_layer
from models.decoder import decoder_layers

Read = Callable[[str, Slices], Tensor]
"""Returns a block of the tensor with a canonical name."""


def global_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of every weight of `model` by canonical name, of routers' biases last; allocates nothing."""
    with torch.device("meta"):
        layers = [named_layer(spec, TensorParallel()) for spec in decoder_layers(model)]
    parameters = (parameter for layer in layers for parameter in layer.parameters())
    shapes = {piece.name: piece.shape for parameter in parameters for piece in parameter.shard.pieces()}  # type: ignore[attr-defined]
    if model.e_score_correction_bias:
        biases = (placed for layer in layers for placed in expert_balances(layer))
        shapes |= {placed.bias_name: (placed.balance.experts,) for placed in biases}
    return shapes


def serial_model(model: ModelConfig, tp: TensorParallel, read: Read) -> SerialModel:
    """Builds the decoder with this rank's slices of the global weights that `read` returns, in fp32 on the CPU."""
    return filled_model(model, tp, lambda target, name, source: target.copy_(read(name, source)))


def filled_model(
    model: ModelConfig,
    tp: TensorParallel,
    fill: Callable[[Tensor, str, Slices], object],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> SerialModel:
    """Builds the decoder in evaluation mode with this rank's slices of weights.

    `fill(target, name, source)` writes the block `source` of a global weight into a tensor.
    """

    @torch.no_grad()
    def filled_layer(spec: LayerSpec, tp: TensorParallel) -> nn.Module:
        layer = named_layer(spec, tp).to(device=device, dtype=dtype)
        for parameter in layer.parameters():
            parameter.zero_()  # padding
            for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
                fill(parameter[piece.target], piece.name, piece.source)
        if model.e_score_correction_bias:
            for _, name, balance in expert_balances(layer):
                balance.bias = torch.zeros(balance.experts, device=device)
                fill(balance.bias, name, (slice(0, balance.experts),))
        return layer

    return SerialModel(decoder_layers(model), tp, filled_layer).eval()
