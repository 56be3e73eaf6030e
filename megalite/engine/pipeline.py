"""PP > 1: the layer list as a DeepSpeed `PipelineModule`, trained by its 1F1B `PipelineEngine` with ZeRO-1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec as DeepSpeedLayerSpec
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from megalite.config import Config, ResolvedLayout
from megalite.engine.activity import Activity, Operation
from megalite.engine.deepspeed_internals import (
    loss_computed_once,
    micro_batch_losses,
    quiet_stdout,
    sum_accumulated_tied_gradients,
    tied_weights,
    watch_schedules,
)
from megalite.engine.distributed import tensor_parallel_of, topology_of
from megalite.engine.engine import Engine, GatedStep, MicroBatch, layer_maker, logits_of, loss_of
from megalite.parallel.layers import BlockInput, LayerSpec, Payload
from megalite.parallel.mesh import Mesh, stage_boundaries


class Pipeline(PipelineModule):  # type: ignore[misc]
    """This rank's stage of the layer list.

    `PipelineModule.__init__` makes the grid, cuts the list (`_partition_layers`), builds the local layers and indexes
    tied ones, in this order (runtime/pipe/module.py): the cut is the first moment when the groups exist and the last
    before layers are built, so there the specs get their tensor-parallel handle and our boundaries replace
    DeepSpeed's, whose methods may leave a stage without a block.
    """

    def __init__(self, specs: Sequence[LayerSpec], config: Config, mesh: Mesh) -> None:
        self._specs, self._config, self._loss = specs, config, loss_of(config)
        super().__init__([None] * len(specs), topology=topology_of(mesh), loss_fn=self._stage_loss)

    def _partition_layers(self, method: str = "parameters") -> None:
        self.tensor_parallel = tensor_parallel_of(self._grid, self._config.parallel.sequence_parallel)
        make_layer = layer_maker(self._config)

        def deepspeed_spec(spec: LayerSpec) -> DeepSpeedLayerSpec:
            if spec.tied_to is None:
                layer = DeepSpeedLayerSpec(nn.Module)
            else:  # several stages hold its weight, and DeepSpeed sums its gradients over them
                layer = TiedLayerSpec(spec.module_key, nn.Module, forward_fn=spec.forward, tied_weight_attr=["weight"])
            # DeepSpeed's own builds an instance of an `nn.Module` subclass
            layer.build = lambda log=False: make_layer(spec, self.tensor_parallel)
            return layer

        self._layer_specs = [deepspeed_spec(spec) for spec in self._specs]
        self.parts = list(
            stage_boundaries([s.cost for s in self._specs], [s.is_block for s in self._specs], self.num_stages)
        )
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def _synchronize_tied_weights(self) -> None:
        with torch.no_grad():  # DeepSpeed broadcasts leaf parameters with autograd watching, and torch warns
            super()._synchronize_tied_weights()

    def forward(self, forward_input: Payload) -> Payload:
        """Runs the stage. Stages exchange plain tensors; a weight among its outputs (the head's) leaves as a view.

        DeepSpeedEngine.forward (runtime/engine.py) starts its backward prologue from hooks on outputs with a
        `grad_fn`, and BF16_Optimizer's prologue clears gradients: a bare parameter has no `grad_fn`, so its gradient
        would be accumulated before the prologue and cleared by it.
        """
        # every stage holds a block, so each one begins before or at a block
        outputs = super().forward(BlockInput.from_payload(forward_input, self._config.model.has_dropout))
        if isinstance(outputs, BlockInput):
            return outputs.to_payload()
        return tuple(output.view_as(output) if isinstance(output, nn.Parameter) else output for output in outputs)

    def _stage_loss(self, outputs: Any, labels: Any) -> Any:
        return self._loss(outputs, labels, self.tensor_parallel)


class PipelinedEngine(Engine):
    """Trains on DeepSpeed's pipeline engine."""

    def __init__(
        self, specs: Sequence[LayerSpec], config: Config, layout: ResolvedLayout, mesh: Mesh, activity: Activity
    ) -> None:
        super().__init__(config, layout, mesh, activity)
        with quiet_stdout():
            model = Pipeline(specs, config, mesh)
        self._initialize(model, None)
        sum_accumulated_tied_gradients(self.deepspeed)
        record_schedule(self.deepspeed, activity)

    @property
    def needs_data(self) -> bool:
        return self.coordinate.pipeline_rank in (0, self.mesh.pipeline_parallel_size - 1)

    def data_parallel_group(self) -> dist.ProcessGroup:
        return self.deepspeed.grid.get_data_parallel_group()

    def _train(
        self, micro_batches: Sequence[MicroBatch], weight: Tensor, step: GatedStep
    ) -> tuple[Sequence[Tensor], Tensor]:
        with loss_computed_once(self.deepspeed) as loss_of_step, step.open(loss_of_step):
            self.deepspeed.train_batch(self._feed(micro_batches, weight))
        self._unite_tied_weights()
        return micro_batch_losses(self.deepspeed), loss_of_step()

    @torch.no_grad()
    def _unite_tied_weights(self) -> None:
        """Copies the first stage's tied weights to the other stages that hold them.

        Stages sum the same gradients at other places of a buffer, in another order, so that their copies would drift
        apart by a rounding per step.
        """
        for weight, group in tied_weights(self.deepspeed.module):
            self.activity.record_op(Operation.UNITE_TIED_WEIGHTS, peers=tuple(dist.get_process_group_ranks(group)))
            dist.broadcast(weight.data, src=dist.get_global_rank(group, 0), group=group)

    def _evaluate(self, micro_batches: Sequence[MicroBatch], count: int, weight: Tensor) -> Tensor:
        feed = self._feed(micro_batches, weight)
        self.activity.record_op(Operation.MEET, peers=self.activity.peers.everyone)  # eval_batch begins with a barrier
        loss: Tensor = self.deepspeed.eval_batch(feed, num_micro_batches=count)
        return loss.squeeze()

    def logits(self, micro_batch: MicroBatch | None) -> Tensor | None:
        weight = torch.zeros((), device=self.deepspeed.device)
        feed = self._feed([] if micro_batch is None else [micro_batch], weight)
        _, outputs = self.deepspeed.eval_batch(feed, return_logits=True, num_micro_batches=1)
        if outputs is None:
            return None
        with torch.no_grad():
            return logits_of(self.config)(outputs, self.deepspeed.module.tensor_parallel)


def record_schedule(engine: Any, activity: Activity) -> None:
    """Makes a DeepSpeed `PipelineEngine` record each instruction in `activity` before executing it, then the loss.

    Instructions name a buffer, not a micro-batch; but each kind comes once per micro-batch, in order. `Engine._feed`
    records the loading of micro-batches.
    """
    peers = activity.peers
    tied = {rank for _, group in tied_weights(engine.module) for rank in dist.get_process_group_ranks(group)}
    per_micro_batch = {
        "ForwardPass": (Operation.FORWARD, peers.tensor),
        "BackwardPass": (Operation.BACKWARD, peers.tensor),
        "SendActivation": (Operation.SEND_ACTIVATION, peers.next),
        "RecvActivation": (Operation.RECEIVE_ACTIVATION, peers.previous),
        "SendGrad": (Operation.SEND_GRADIENT, peers.previous),
        "RecvGrad": (Operation.RECEIVE_GRADIENT, peers.next),
    }
    per_step = {
        "ReduceTiedGrads": (Operation.REDUCE_TIED_GRADIENTS, tuple(sorted(tied))),
        "ReduceGrads": (Operation.REDUCE_GRADIENTS, peers.data),
        "OptimizerStep": (Operation.OPTIMIZER, peers.everyone),
    }
    numbers: dict[str, int] = {}

    def record_instruction(name: str) -> None:
        if name in per_micro_batch:
            numbers[name] = number = numbers.get(name, 0) + 1
            operation, ranks = per_micro_batch[name]
            activity.record_op(operation, number, ranks)
        elif name in per_step:
            activity.record_op(per_step[name][0], peers=per_step[name][1])

    watch_schedules(
        engine, numbers.clear, record_instruction, lambda: activity.record_op(Operation.LOSS, peers=peers.loss)
    )
