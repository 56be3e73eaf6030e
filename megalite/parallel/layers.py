"""A model as a list of `LayerSpec`s, and the serial model that the list spells out.

One entry is one unit of pipeline placement, of recomputation and one Hugging Face prefix. `SerialModel` runs the
list in order on one process (or one stage's worth of tensor-parallel ranks): it is the specification that every
pipelined run is tested against, and what the plain DeepSpeed engine trains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.parallel.collectives import TensorParallel
from megalite.parallel.dropout import Dropout
from megalite.parallel.initialize import initialize_

Payload = Tensor | tuple[Tensor, ...]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class LayerSpec:
    """One layer: how to build it on this rank, what it is called, what it costs."""

    name: str  # prefix of its parameters' canonical names, e.g. "model.layers.3"
    build: Callable[[TensorParallel], nn.Module]
    cost: float  # forward time relative to the other entries, for balancing stages
    is_block: bool = False
    tied_to: str | None = None  # entries with the same value share one module, and so its weight
    forward: Callable[[nn.Module, Any], Any] | None = None  # instead of the module's own, for a tied entry

    @property
    def module_key(self) -> str:
        """Name of the module in a container: tied entries share it; without dots, which torch refuses."""
        return (self.tied_to or self.name).replace(".", "/")


MakeLayer = Callable[[LayerSpec, TensorParallel], nn.Module]


def make_layer(spec: LayerSpec, tp: TensorParallel, *, seed: int, initializer_range: float) -> nn.Module:
    """Builds a layer with its initial weights; every parameter's shard and every dropout learns its canonical path."""
    module = spec.build(tp)
    module.layer_name = spec.name  # type: ignore[assignment]  # any attribute may be set on a module
    for path, parameter in module.named_parameters():
        shard = dataclasses.replace(parameter.shard, name=f"{spec.name}.{path}")  # type: ignore[attr-defined]
        parameter.shard = shard  # type: ignore[attr-defined]
        initialize_(parameter, shard, seed, initializer_range)
    for path, part in module.named_modules():
        if isinstance(part, Dropout):
            part.place(seed, f"{spec.name}.{path}")
    return module


class SerialModel(nn.Module):
    """The layers in order, as one module."""

    def __init__(self, specs: Sequence[LayerSpec], tp: TensorParallel, make_layer: MakeLayer) -> None:
        super().__init__()
        self.specs = tuple(specs)
        self.layers = nn.ModuleDict()
        for spec in specs:
            if spec.module_key not in self.layers:
                self.layers[spec.module_key] = make_layer(spec, tp)

    def forward(self, payload: Payload) -> Any:
        """From the first layer's payload to the last layer's output."""
        for spec in self.specs:
            module = self.layers[spec.module_key]
            payload = module(payload) if spec.forward is None else spec.forward(module, payload)
        return payload


def named_shards(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of a model or stage by canonical path, tied ones once."""
    for parameter in module.parameters():
        yield parameter.shard.name, parameter  # type: ignore[attr-defined]


def recomputed(function: Callable[..., Any], *inputs: Any) -> Any:
    """Runs `function` without keeping its activations; backward runs it again (Chen 2016).

    Non-reentrant, so that a first layer whose inputs are integers still gets gradients.
    """
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
