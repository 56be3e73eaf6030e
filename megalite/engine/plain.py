"""PP = 1: the whole layer list as one module, trained by DeepSpeed's plain engine with ZeRO 1-3."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config import Config, ResolvedLayout
from megalite.engine.activity import Activity, Operation
from megalite.engine.deepspeed_internals import quiet_stdout
from megalite.engine.distributed import Grid, tensor_parallel_of
from megalite.engine.engine import Engine, GatedStep, MicroBatch, layer_maker, logits_of, loss_of
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import BlockInput, LayerSpec, Payload, SerialModel
from megalite.parallel.mesh import Mesh


class PlainModel(nn.Module):
    """The serial model with its loss: ZeRO-3 holds the head's weight only while a forward is running."""

    def __init__(self, specs: Sequence[LayerSpec], config: Config, tp: TensorParallel) -> None:
        super().__init__()
        self.tensor_parallel, self._has_dropout = tp, config.model.has_dropout
        self._loss, self._logits = loss_of(config), logits_of(config)
        self.serial = SerialModel(specs, tp, layer_maker(config))

    def forward(self, inputs: Payload, labels: Any = None) -> Tensor:
        """Maps the first layer's payload and (targets, weight) to a scalar; without labels to the logits."""
        outputs = self.serial(*BlockInput.from_payload(inputs, self._has_dropout))
        if labels is None:
            return self._logits(outputs, self.tensor_parallel)
        return self._loss(outputs, labels, self.tensor_parallel)


class PlainEngine(Engine):
    """Trains on DeepSpeed's plain engine."""

    def __init__(
        self, specs: Sequence[LayerSpec], config: Config, layout: ResolvedLayout, mesh: Mesh, activity: Activity
    ) -> None:
        super().__init__(config, layout, mesh, activity)
        with quiet_stdout():
            self._grid = Grid(mesh)
        tp = tensor_parallel_of(self._grid, config.parallel.sequence_parallel)
        self._initialize(PlainModel(specs, config, tp), self._grid)
        # ZeRO-3 gathers weights from all replicas on the way
        self._forward_peers = activity.peers.stage if layout.zero_stage == 3 else activity.peers.tensor

    @property
    def needs_data(self) -> bool:
        return True

    def data_parallel_group(self) -> dist.ProcessGroup:
        return self._grid.get_data_parallel_group()

    def _train(
        self, micro_batches: Sequence[MicroBatch], weight: Tensor, step: GatedStep
    ) -> tuple[Sequence[Tensor], Tensor]:
        total, losses = torch.zeros((), device=self.deepspeed.device), []
        loss_of_step = cache(lambda: self._mean_over_replicas(total / len(micro_batches)))
        record_op, peers = self.activity.record_op, self.activity.peers
        with step.open(loss_of_step):
            for number, (inputs, labels) in enumerate(self._feed(micro_batches, weight), start=1):
                record_op(Operation.FORWARD, number, self._forward_peers)
                loss = self.deepspeed(inputs, labels)
                losses.append(loss.detach())
                total += losses[-1]
                record_op(Operation.BACKWARD, number, peers.stage)  # ZeRO sums gradients as they come
                self.deepspeed.backward(loss)
                record_op(Operation.OPTIMIZER, number, peers.everyone)
                self.deepspeed.step()  # steps the optimizer after the last micro-batch only
        record_op(Operation.LOSS, peers=peers.loss)
        return losses, loss_of_step()

    def _evaluate(self, micro_batches: Sequence[MicroBatch], count: int, weight: Tensor) -> Tensor:
        self.deepspeed.eval()
        losses = []
        with torch.no_grad():
            for number, fed in enumerate(self._feed(micro_batches, weight), start=1):
                self.activity.record_op(Operation.FORWARD, number, self._forward_peers)
                losses.append(self.deepspeed(*fed))
        self.deepspeed.train()
        self.activity.record_op(Operation.LOSS, peers=self.activity.peers.loss)
        return self._mean_over_replicas(torch.stack(losses).mean())

    def logits(self, micro_batch: MicroBatch | None) -> Tensor | None:
        assert micro_batch is not None
        self.deepspeed.eval()
        with torch.no_grad():
            ((inputs, _),) = self._feed([micro_batch], torch.zeros(()))
            logits: Tensor = self.deepspeed(inputs)
        self.deepspeed.train()
        return logits

    def _mean_over_replicas(self, loss: Tensor) -> Tensor:
        if self.mesh.data_parallel_size > 1:
            dist.all_reduce(loss, group=self.data_parallel_group())
        return loss / self.mesh.data_parallel_size
