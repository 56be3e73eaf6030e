"""One `train_step` over DeepSpeed's engine, whether or not the model is cut into pipeline stages.

In: micro-batches of token ids as numpy arrays. Out: the loss, the gradient norm before clipping, whether the step
was skipped. The loss and its gradient are the mean over the valid tokens of the whole global batch, however it is cut
into micro-batches and replicas (docs/design.md, The loss).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config import Config, ResolvedLayout
from megalite.config.batch_stages import BatchShape, shapes_of
from megalite.engine.batch_transfer import BatchTransfer, DeviceBatch, MicroBatch, cut_sequences
from megalite.engine.compression.weights import weight_gathers
from megalite.engine.deepspeed.internals import flat_groups
from megalite.engine.deepspeed.loss_scale import loss_scaler_tensor
from megalite.engine.deepspeed.process_groups import Grid
from megalite.engine.deepspeed.step import current_loss_scale
from megalite.engine.initialization import LayerMaker, initialize
from megalite.engine.optimizers.muon import Muon
from megalite.engine.reduction.gradient_reduction import GradientReducer
from megalite.engine.reduction.partitioned_step import PartitionedStep
from megalite.engine.reduction.take_over import take_over_step
from megalite.engine.stages import Labels
from megalite.engine.statistics.expert_bias import ExpertBias, ExpertCounts
from megalite.engine.statistics.source_losses import SourceLosses
from megalite.engine.step_decision import StepDecision, StepGate
from megalite.engine.step_participant import StepParticipant
from megalite.engine.step_result import Readback, StepResult
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.expert_balance import expert_balances
from megalite.parallel.layers import named_shards
from megalite.parallel.loss import IGNORED
from megalite.parallel.mesh import Mesh
from megalite.tracing.activity import Activity, Operation, Phase

if TYPE_CHECKING:
    from megalite.engine.pipeline.tying import TiedWeight
    from megalite.engine.reduction.weight_gathers import WeightGathers


class Engine(ABC):
    """A model under training on this rank."""

    def __init__(self, config: Config, layout: ResolvedLayout, mesh: Mesh, activity: Activity) -> None:
        self.config, self.layout, self.mesh, self.activity = config, layout, mesh, activity
        self.coordinate, self._replicas = mesh.coordinate(dist.get_rank()), mesh.replicas
        self._grid = Grid(mesh)
        self._tp = TensorParallel(
            mesh.tensor_parallel_size,
            self.coordinate.tensor_rank,
            self._grid.get_slice_parallel_group(),
            config.parallel.sequence_parallel,
            self._grid.context_parallel(layout),
            self._grid.experts(layout),
        )
        self._make = LayerMaker(config, layout, self._grid)
        peers = activity.peers
        # ZeRO-3 gathers weights on the way
        self._compute_peers = peers.stage if layout.zero_stage == 3 else tuple(sorted({*peers.layer, *peers.experts}))
        self.tied_weight: TiedWeight | None = None  # whose copy another rank holds, or the copy
        self.deepspeed: Any
        self.torch_optimizer: torch.optim.Optimizer
        self.partitioned_step: PartitionedStep
        self.reducer: GradientReducer
        self.gathers: WeightGathers | None = None  # None: weights are whole after each step
        self.expert_counts: ExpertCounts | None = None  # None: this rank's blocks have no experts
        self.expert_bias: ExpertBias | None = None
        self.source_losses: SourceLosses | None = None  # None: the data is one text
        self.shape = shapes_of(config.training)[0]
        self.runs_ahead = False  # the device works while the host goes on: results may be read a step late

    def _initialize(self, model: torch.nn.Module) -> None:
        """Completes the engine; a subclass calls it once, when it has its modules and knows `tied_weight`."""
        self.deepspeed, self.torch_optimizer = initialize(model, self.config, self.layout, self._grid, self._tp)
        device, trained = self.deepspeed.device, [each for each in model.parameters() if each.requires_grad]
        self.decision = StepDecision(self.deepspeed, self._tp, may_be_late=not self.config.is_optimizer_offloaded)
        step = take_over_step(self.deepspeed, trained, self.config, self.activity, self._tp, self.decision)
        self.partitioned_step, self.reducer = step, step.reducer
        if isinstance(self.torch_optimizer, Muon):
            groups = flat_groups(self.deepspeed.optimizer)
            self.torch_optimizer.connect(groups, self.data_parallel_group(), self._tp)
        self._participants: list[StepParticipant] = []
        self.balances = list(expert_balances(model))
        if self.balances:
            self.expert_counts = ExpertCounts(self.balances, device)
            self._participants.append(self.expert_counts)
        if self.config.training.router.bias_rate or self.config.model.e_score_correction_bias:
            self.bias_experts()
        if self.config.data.sources:
            self.source_losses = SourceLosses(len(self.config.data.sources), device)
            self._participants.append(self.source_losses)
        if self.layout.zero_stage < 3 and self._replicas > 1:
            at_once = [] if self.tied_weight is None else [self.tied_weight.weight]
            self.gathers = weight_gathers(self.config, self.deepspeed.optimizer, model, self.activity, at_once)
        self._participants += [each for each in (self.gathers, self.tied_weight) if each is not None]
        self._transfer = BatchTransfer(device, has_dropout=self.config.model.has_dropout)
        self.runs_ahead = device.type == "cuda"

    def bias_experts(self) -> None:
        """Lets this rank's routers choose with a bias, zeros until it is loaded or moved by a step."""
        if self.expert_counts is not None and self.expert_bias is None:
            replicas = self.data_parallel_group() if self._replicas > 1 else None
            rate = self.config.training.router.bias_rate
            self.expert_bias = ExpertBias(self.expert_counts, rate, replicas, self.activity)
            self._participants.append(self.expert_bias)

    @property
    @abstractmethod
    def needs_data(self) -> bool:
        """True on ranks that hold the first or the last layer."""

    @abstractmethod
    def _accumulate_gradients(self, micro_batches: Sequence[DeviceBatch], weight: Tensor) -> list[Tensor]:
        """Runs forward and backward of all micro-batches; returns `StepResult.micro_losses`."""

    @abstractmethod
    def _evaluate(self, micro_batches: Sequence[DeviceBatch], count: int, weight: Tensor) -> list[Tensor]:
        """Returns the loss of each micro-batch on ranks that hold the last layer."""

    @abstractmethod
    def logits(self, micro_batch: MicroBatch) -> Tensor | None:
        """`[micro_batch, seq/cp, vocab]` in evaluation mode, on ranks that hold the head; collective over the replica.

        Every rank is given the micro-batch, which may be of any shape. All logits at once: for small batches.
        """

    @property
    @abstractmethod
    def _loss_peers(self) -> tuple[int, ...]:
        """The ranks that `_over_replicas` may wait for."""

    def _sum_of(self, losses: Tensor | Sequence[Tensor]) -> Tensor:
        """Returns the sum of what `_accumulate_gradients` returned, 0 on ranks without the last layer."""
        if not len(losses):
            return torch.zeros((), device=self.deepspeed.device)
        return (losses if isinstance(losses, Tensor) else torch.stack(list(losses))).sum()

    def _over_replicas(self, numbers: Tensor) -> Tensor:
        """Returns numbers of the ranks with the last layer, added up over replicas, on all ranks; collective."""
        if self._replicas > 1:
            dist.all_reduce(numbers, group=self.data_parallel_group())
        return numbers

    def _reduced_losses(self, losses: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Returns the mean over the global batch of what `_accumulate_gradients` returned, and the sums of
        `SourceLosses` over all replicas, which travel with it; collective."""
        loss, replicas = self._sum_of(losses), self._replicas
        if self.source_losses is None:
            return self._over_replicas(loss) / replicas, None
        numbers = self._over_replicas(torch.cat([loss.double().view(1), self.source_losses.sums.flatten()]))
        return (numbers[0] / replicas).float(), numbers[1:].view(2, -1)

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each replica."""
        return self.shape.micro_batches(self.mesh.data_parallel_size)

    def use_shape(self, shape: BatchShape) -> None:
        """Makes the next steps take global batches of `shape`; the result of every step before has been read."""
        if shape == self.shape:
            return
        self.shape = shape
        self.activity.batch_changes += 1
        self.deepspeed.set_train_micro_batch_size(shape.micro_batch_size)
        self.deepspeed.set_train_batch_size(shape.global_batch_size * self.mesh.context_parallel_size)

    def data_parallel_group(self, *, of_experts: bool = False) -> dist.ProcessGroup:
        """Returns the group of the ranks that hold what this one holds: the same weights, or the same dealt experts."""
        return self._grid.same_experts_group if of_experts else self._grid.get_data_parallel_group()

    def replicas_of(self, parameter: torch.nn.Parameter) -> dist.ProcessGroup:
        """Returns the group of the ranks that hold what this one holds of a parameter: of experts not all replicas."""
        is_dealt = parameter.shard.is_dealt  # type: ignore[attr-defined]
        return self.data_parallel_group(of_experts=is_dealt)

    def tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """Returns the group of the ranks that share this one's layers and samples; None if this one does alone."""
        return self._tp.group

    @property
    def tensor_parallel(self) -> TensorParallel:
        """The ranks that share this one's layers, its sequences, and its layers' experts."""
        return self._tp

    def pipeline_groups(self) -> list[dist.ProcessGroup]:
        """Returns the groups of this rank's pipeline; none if the model is not cut into stages."""
        return []

    def train_step(
        self, micro_batches: Sequence[MicroBatch], learning_rate: float, gate: StepGate | None = None
    ) -> StepResult:
        """Runs one optimizer step over this replica's micro-batches; an empty sequence where `needs_data` is False.

        A step whose loss or gradients are not finite changes nothing, nor does one that `gate` refuses. One without any
        valid token has loss and gradient 0 and is taken: AdamW's moments decay, and momentum and decay move weights.
        """
        self.activity.begin_phase(Phase.STEP)
        if self._tp.context.size > 1:
            micro_batches = cut_sequences(micro_batches, self._tp.context)
        for group in self.torch_optimizer.param_groups:
            group["lr"] = learning_rate
        weight = self._token_weight(micro_batches)
        self._weigh_balance_losses()
        is_scaled, optimizer = self.config.precision.dtype == "fp16", self.deepspeed.optimizer
        loss_scaler = loss_scaler_tensor(optimizer) if is_scaled else None  # which the step moves
        for participant in self._participants:
            participant.begin_step(micro_batches)
        self.reducer.begin(self.micro_batches)
        micro_losses = self._accumulate_gradients(self._transfer(micro_batches), weight)
        self.reducer.finish()
        global_losses = cache(partial(self._reduced_losses, micro_losses))  # collective; the gate may ask first
        with self.decision.about(gate, lambda: global_losses()[0]):
            self.activity.record_op(Operation.OPTIMIZER, peers=self.activity.peers.everyone)
            self.deepspeed.step()  # runs `PartitionedStep`, which `take_over_step` has put in the optimizer's place
        self.activity.record_op(Operation.LOSS, peers=self._loss_peers)
        (loss, by_source), norm = global_losses(), self.deepspeed.get_global_grad_norm()
        for participant in self._participants:  # behind the loss, which would wait for the gathers of weights
            participant.after_step(self.decision)
        usage = None if self.expert_counts is None else self.expert_counts.usage
        readback = Readback(loss, norm, self.decision.skipped, usage, by_source, loss_scaler)
        self.activity.record_op(Operation.FINISH, peers=self.activity.peers.everyone)
        norms = self.partitioned_step.part_norms if self.decision.is_late(gate) else None
        return StepResult(readback, self.decision.refused, tuple(micro_losses), weight, norms, loss_scaler)

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], count: int, next_part: Callable[[int], int] | None = None
    ) -> Tensor:
        """Returns the mean loss over the valid tokens of all replicas' micro-batches, `count` on each.

        With `next_part` they are evaluated in parts, the first of which is one for each stage. It is told the size of
        each part and returns that of the next one, equal on all ranks; what it raises ends the evaluation.
        """
        self.activity.begin_phase(Phase.EVALUATION)
        if self._tp.context.size > 1:
            micro_batches = cut_sequences(micro_batches, self._tp.context)
        self.deepspeed.eval()
        weight, losses, done = self._token_weight(micro_batches), list[Tensor](), 0
        part = count if next_part is None else self.mesh.pipeline_parallel_size
        try:
            while done < count:
                part = min(part, count - done)
                with torch.no_grad():
                    found = self._evaluate(self._transfer(micro_batches[done : done + part]), part, weight)
                losses += [torch.stack(found)] if found else []  # one by one they would hold much more memory
                done += part
                if next_part is not None:
                    part = next_part(part)
        finally:
            self.deepspeed.train()
        self.activity.record_op(Operation.LOSS, peers=self._loss_peers)
        loss = self._over_replicas(self._sum_of(torch.cat(losses) if losses else ())) / self._replicas
        self.activity.record_op(Operation.FINISH, peers=self.activity.peers.everyone)
        return loss

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by canonical path, whole, in the same order on ranks with the same layers."""
        if self.gathers is not None:
            self.gathers.settle()
        yield from named_shards(self.deepspeed.module)

    def _token_weight(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Returns the factor on each micro-batch's summed loss with which the mean over replicas is the token mean."""
        known = micro_batches[0].global_valid_targets if micro_batches else 0
        valid = sum(int((batch.targets != IGNORED).sum()) for batch in micro_batches) if known is None else known
        total = torch.full((), float(valid), device=self.deepspeed.device)  # a copy from the host would wait
        if known is None and self._replicas > 1:
            self.activity.record_op(Operation.COUNT_TOKENS, peers=self.activity.peers.data)
            dist.all_reduce(total, group=self.data_parallel_group())
        return self._replicas / total.clamp(min=1.0)

    def _weigh_balance_losses(self) -> None:
        """Makes routers add their balance losses, each as the mean over the sequences of the global batch."""
        sequences = self.shape.global_batch_size / self._replicas  # gradients are averaged
        loss_scale = current_loss_scale(self.deepspeed.optimizer) if self.balances else 1.0
        for _, _, balance in self.balances:
            balance.losses, balance.scale = self.config.training.router, loss_scale / sequences

    def _labels(self, batch: DeviceBatch, weight: Tensor) -> Labels:
        """Builds what the loss is computed from."""
        if self.source_losses is None or batch.sources is None:
            return Labels(batch.targets, weight)
        return Labels(batch.targets, weight, partial(self.source_losses.add, batch.sources))
