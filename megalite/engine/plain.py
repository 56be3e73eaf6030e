"""PP = 1: the same layer list as one module, trained by DeepSpeed's plain engine with ZeRO 1-3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from megalite.engine.pipeline import Loss
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import LayerSpec, MakeLayer, SerialModel

Logits = Callable[[Any, TensorParallel], Tensor]  # (last layer's output, group) -> [batch, seq, vocab]


class PlainModel(nn.Module):
    """The serial model with its loss: ZeRO-3 holds the head's weight only while a forward is running."""

    def __init__(
        self, specs: Sequence[LayerSpec], tp: TensorParallel, make_layer: MakeLayer, loss: Loss, logits: Logits
    ) -> None:
        super().__init__()
        self.tensor_parallel, self._loss, self._logits = tp, loss, logits
        self.serial = SerialModel(specs, tp, make_layer)

    def forward(self, inputs: Any, labels: Any = None) -> Tensor:
        """The first layer's payload and (targets, weight) -> scalar; without labels the logits."""
        outputs = self.serial(inputs)
        if labels is None:
            return self._logits(outputs, self.tensor_parallel)
        return self._loss(outputs, labels, self.tensor_parallel)
