"""Trains a model that is not cut into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.config import Config, ResolvedLayout
from megalite.engine.batch_transfer import DeviceBatch, MicroBatch, cut_sequences
from megalite.engine.deepspeed.step import backward
from megalite.engine.engine import Engine
from megalite.engine.stages import Chunk
from megalite.parallel.layers import LayerSpec
from megalite.parallel.mesh import Mesh
from megalite.tracing.activity import Activity, Operation


class PlainEngine(Engine):
    """Trains a model that is not cut into stages."""

    def __init__(
        self, specs: Sequence[LayerSpec], config: Config, layout: ResolvedLayout, mesh: Mesh, activity: Activity
    ) -> None:
        super().__init__(config, layout, mesh, activity)
        self._initialize(Chunk(specs, config, self._tp, self._make, is_last=True))

    @property
    def needs_data(self) -> bool:
        return True

    @property
    def _loss_peers(self) -> tuple[int, ...]:
        return self.activity.peers.data

    def _accumulate_gradients(self, micro_batches: Sequence[DeviceBatch], weight: Tensor) -> list[Tensor]:
        losses = []
        for number, batch in enumerate(micro_batches, start=1):
            loss = self._loss(number, batch, weight)
            losses.append(loss.detach())
            self.activity.record_op(Operation.BACKWARD, number, self._compute_peers)
            backward(self.deepspeed, loss)
        return losses

    def _evaluate(self, micro_batches: Sequence[DeviceBatch], count: int, weight: Tensor) -> list[Tensor]:
        return [self._loss(number, batch, weight) for number, batch in enumerate(micro_batches, start=1)]

    def _loss(self, number: int, batch: DeviceBatch, weight: Tensor) -> Tensor:
        self.activity.record_op(Operation.LOAD, number)
        labels = self._labels(batch, weight)
        self.activity.record_op(Operation.FORWARD, number, self._compute_peers)
        loss: Tensor = self.deepspeed(batch.inputs, labels)
        return loss

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        self.deepspeed.eval()
        with torch.no_grad():
            (batch,) = self._transfer(cut_sequences([micro_batch], self._tp.context))
            logits: Tensor = self.deepspeed(batch.inputs)
        self.deepspeed.train()
        return logits
