"""A stored model on one process: its weights' shapes, and our decoder filled with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megalite.checkpoint.manifest import Slices
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import LayerSpec, SerialModel
from models.decoder import decoder_layers

Read = Callable[[str, Slices], Tensor]
"""Canonical name of a tensor, its block -> that block."""


def global_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every weight of `model`; nothing is allocated."""
    with torch.device("meta"):
        layers = [named_layer(spec, TensorParallel()) for spec in decoder_layers(model)]
    parameters = (parameter for layer in layers for parameter in layer.parameters())
    return {piece.name: piece.shape for parameter in parameters for piece in parameter.shard.pieces()}  # type: ignore[attr-defined]


def serial_model(model: ModelConfig, tp: TensorParallel, read: Read) -> SerialModel:
    """The decoder with this rank's slices of the global weights that `read` gives."""

    @torch.no_grad()
    def filled_layer(spec: LayerSpec, tp: TensorParallel) -> nn.Module:
        layer = named_layer(spec, tp)
        for parameter in layer.parameters():
            parameter.zero_()  # padding
            for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
                parameter[piece.target].copy_(read(piece.name, piece.source))
        return layer

    return SerialModel(decoder_layers(model), tp, filled_layer).eval()


def named_layer(spec: LayerSpec, tp: TensorParallel) -> nn.Module:
    """A layer without values whose shards know their names."""
    layer = spec.build(tp)
    for path, parameter in layer.named_parameters():
        parameter.shard = dataclasses.replace(parameter.shard, name=f"{spec.name}.{path}")  # type: ignore[attr-defined]
    return layer
