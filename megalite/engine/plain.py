"""PP = 1: the same layer list as one module, trained by DeepSpeed's plain engine with ZeRO 1-3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from megalite.engine.pipeline import Loss
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import LayerSpec, MakeLayer, SerialModel


class PlainModel(nn.Module):
    """The serial model with its loss: ZeRO-3 holds the head's weight only while a forward is running."""

    def __init__(self, specs: Sequence[LayerSpec], tp: TensorParallel, make_layer: MakeLayer, loss: Loss) -> None:
        super().__init__()
        self.tensor_parallel, self._loss = tp, loss
        self.serial = SerialModel(specs, tp, make_layer)

    def forward(self, inputs: Any, labels: Any) -> Tensor:
        """The first layer's payload and (targets, weight) -> scalar."""
        return self._loss(self.serial(inputs), labels, self.tensor_parallel)
