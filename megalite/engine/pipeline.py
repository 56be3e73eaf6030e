"""PP > 1: the layer list as a DeepSpeed `PipelineModule`, trained by its 1F1B `PipelineEngine` with ZeRO-1."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec as DeepSpeedLayerSpec
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from megalite.engine.activity import Activity, Operation
from megalite.engine.seams import tied_weights, watch_schedules
from megalite.engine.topology import tensor_parallel_of, topology_of
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import LayerSpec, MakeLayer
from megalite.parallel.mesh import Mesh
from megalite.parallel.partition import stage_boundaries

Loss = Callable[[Any, Any, TensorParallel], Tensor]  # (last layer's output, labels, group) -> scalar


class Pipeline(PipelineModule):  # type: ignore[misc]
    """This rank's stage of the layer list.

    `PipelineModule.__init__` makes the grid, cuts the list (`_partition_layers`), builds the local layers and indexes
    tied ones, in this order (runtime/pipe/module.py): the cut is the first moment when the groups exist and the last
    before layers are built, so there the specs get their tensor-parallel handle and our boundaries replace
    DeepSpeed's, whose methods may leave a stage without a block.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        mesh: Mesh,
        sequence_parallel: bool,
        make_layer: MakeLayer,
        loss: Loss,
    ) -> None:
        self._specs, self._sequence_parallel, self._make_layer, self._loss = (
            specs,
            sequence_parallel,
            make_layer,
            loss,
        )
        super().__init__([None] * len(specs), topology=topology_of(mesh), loss_fn=self._stage_loss)

    def _partition_layers(self, method: str = "parameters") -> None:
        self.tensor_parallel = tensor_parallel_of(self._grid, self._sequence_parallel)
        self._layer_specs = [self._to_deepspeed(spec) for spec in self._specs]
        self.parts = list(
            stage_boundaries([s.cost for s in self._specs], [s.is_block for s in self._specs], self.num_stages)
        )
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])

    def _synchronize_tied_weights(self) -> None:
        with torch.no_grad():  # DeepSpeed broadcasts leaf parameters with autograd watching, and torch warns
            super()._synchronize_tied_weights()

    def _to_deepspeed(self, spec: LayerSpec) -> DeepSpeedLayerSpec:
        make = partial(self._make_layer, spec, self.tensor_parallel)
        if spec.tied_to is None:
            return _Layer(make)
        return _TiedLayer(spec.module_key, make, spec.forward)

    def forward(self, forward_input: Any) -> Any:
        """The stage; a weight among its outputs (the head's) leaves as a view of itself.

        DeepSpeedEngine.forward (runtime/engine.py) starts its backward prologue from hooks on outputs with a
        `grad_fn`, and BF16_Optimizer's prologue clears gradients: a bare parameter has no `grad_fn`, so its gradient
        would be accumulated before the prologue and cleared by it.
        """
        outputs = super().forward(forward_input)
        if not isinstance(outputs, tuple):
            return outputs
        return tuple(output.view_as(output) if isinstance(output, nn.Parameter) else output for output in outputs)

    def _stage_loss(self, outputs: Any, labels: Any) -> Any:
        return self._loss(outputs, labels, self.tensor_parallel)


class _Layer(DeepSpeedLayerSpec):  # type: ignore[misc]
    """A DeepSpeed layer spec that builds through ours (the base class only takes an `nn.Module` subclass)."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__(nn.Module)
        self.make = make

    def build(self, log: bool = False) -> nn.Module:
        return self.make()


class _TiedLayer(TiedLayerSpec):  # type: ignore[misc]
    """The same for a layer whose weight several stages hold; DeepSpeed sums its gradients over them."""

    def __init__(
        self, key: str, make: Callable[[], nn.Module], forward: Callable[[nn.Module, Any], Any] | None
    ) -> None:
        super().__init__(key, nn.Module, forward_fn=forward, tied_weight_attr=["weight"])
        self.make = make

    def build(self, log: bool = False) -> nn.Module:
        return self.make()


def note_schedule(engine: Any, activity: Activity) -> None:
    """Makes a DeepSpeed `PipelineEngine` note each instruction before it executes it, and the loss after the last.

    Instructions name a buffer, not a micro-batch; but each kind comes once per micro-batch, in order. Loading is noted
    by the feed.
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

    def note_instruction(name: str) -> None:
        if name in per_micro_batch:
            numbers[name] = number = numbers.get(name, 0) + 1
            operation, ranks = per_micro_batch[name]
            activity.note(operation, number, ranks)
        elif name in per_step:
            activity.note(per_step[name][0], peers=per_step[name][1])

    watch_schedules(engine, numbers.clear, note_instruction, lambda: activity.note(Operation.LOSS, peers=peers.loss))
