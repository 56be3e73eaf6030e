"""One `train_step` over DeepSpeed's plain engine, whether or not the model is cut into pipeline stages.

In: micro-batches of token ids as numpy arrays. Out: the loss, the gradient norm before clipping, whether the step
was skipped. The loss and its gradient are the mean over the valid tokens of the whole global batch, however it is cut
into micro-batches and replicas: gradients of micro-batches are added up and their mean over replicas is taken, so each
micro-batch's summed loss is weighted by `replicas / valid tokens of the global batch`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import deepspeed
import deepspeed.runtime.bf16_optimizer as bf16_optimizer
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from pydantic import ValidationError
from torch import Tensor

from megalite.config import Config, ConfigError, ResolvedLayout
from megalite.config.layout import reduces_beside_backward
from megalite.engine.activity import Activity, Operation, Phase
from megalite.engine.compilation import compile_blocks
from megalite.engine.cpu_adam import BUILD_LIMIT, why_no_cpu_adam
from megalite.engine.deepspeed_config import deepspeed_config
from megalite.engine.deepspeed_internals import (
    clear_gradient_partitions,
    flat_groups,
    quiet_stdout,
    share_fp32_weights,
    stay_at_smallest_loss_scale,
)
from megalite.engine.distributed import Grid, group_timeout, tensor_parallel_of
from megalite.engine.gradient_reduction import GradientReducer
from megalite.engine.handover import backward
from megalite.engine.muon import Muon
from megalite.engine.optimizers import build_optimizer
from megalite.engine.partitioned_step import partition_reductions
from megalite.engine.stages import Chunk, TiedWeight
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.expert_balance import expert_balances
from megalite.parallel.layers import BlockInput, LayerSpec, named_shards
from megalite.parallel.loss import IGNORED
from megalite.parallel.mesh import Mesh

log = logging.getLogger(__name__)


class StepGate(Protocol):
    """Decides which steps are taken. Every rank has one, and all must answer alike."""

    def takes(self, loss: Callable[[], float]) -> bool:
        """Returns whether a step with finite gradients is taken.

        `loss()` is the mean over the valid tokens of the global batch, the same bits on all ranks. It is collective
        and waits for the device: call it on all ranks or on none.
        """

    def examine(self) -> None:
        """Is called on all ranks when a step is not taken, while its gradients still exist."""


class GatedStep:
    """One optimizer step that a `StepGate` may refuse; without a gate every finite step is taken."""

    def __init__(self, gate: StepGate | None, optimizer: Any, tp: TensorParallel) -> None:
        self._gate, self._optimizer, self._tp = gate, optimizer, tp
        self.refused = False  # finite, and not taken by the gate

    @contextmanager
    def open(self, loss: Callable[[], Tensor]) -> Iterator[None]:
        """Asks the gate in each optimizer step of the `with`; `loss` computes the step's loss, once.

        A refused step does what DeepSpeed does on an overflow: weights, moments and step counts stay, gradients and
        buffers are cleared, `skipped_steps` grows; fp16's loss scale stays.

        DeepSpeed offers no callback between its check for overflow and the update, so the function is replaced that
        every step calls there: `_update_scale` of DeepSpeedZeroOptimizer and DeepSpeedZeroOptimizer_Stage3
        (runtime/zero/stage_1_and_2.py and stage3.py), which look at `overflow` after it; for BF16_Optimizer
        (runtime/bf16_optimizer.py) its module's `is_invalid_grad_norm`, which nothing else calls.
        """
        if self._gate is None:
            yield
            return
        gate, optimizer = self._gate, self._optimizer

        def refuses(is_not_finite: bool) -> bool:
            self.refused = not is_not_finite and not gate.takes(lambda: self._common(loss()))
            if is_not_finite or self.refused:
                gate.examine()
            return self.refused

        if hasattr(optimizer, "_update_scale"):
            update_scale = optimizer._update_scale

            def ask_first(has_overflow: bool = False) -> None:
                if refuses(has_overflow):
                    optimizer.overflow = True
                else:
                    update_scale(has_overflow)

            optimizer._update_scale = ask_first
            try:
                yield
            finally:
                del optimizer._update_scale
            return
        is_invalid = bf16_optimizer.is_invalid_grad_norm

        def ask_or_invalid(norm: Any) -> bool:
            has_overflow = is_invalid(norm)
            return refuses(has_overflow) or has_overflow

        bf16_optimizer.is_invalid_grad_norm = ask_or_invalid
        try:
            yield
        finally:
            bf16_optimizer.is_invalid_grad_norm = is_invalid

    def _common(self, loss: Tensor) -> float:
        """Returns the first tensor-parallel rank's loss: each has computed its own, maybe with another last bit."""
        if self._tp.group is not None and self._tp.size > 1:
            dist.broadcast(loss, src=dist.get_global_rank(self._tp.group, 0), group=self._tp.group)
        return float(loss)


class MicroBatch(Protocol):
    """The samples of one forward pass."""

    @property
    def tokens(self) -> np.ndarray: ...  # [micro_batch, seq] int64
    @property
    def targets(self) -> np.ndarray: ...  # [micro_batch, seq] int64, -100 where a token carries no loss
    @property
    def positions(self) -> np.ndarray | None: ...  # [micro_batch, seq] int64, 0 at a document's start
    @property
    def samples(self) -> np.ndarray: ...  # [micro_batch] int64, numbers in the order of the data, for dropout


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step, equal on all ranks; tensors, which wait for the device only when read."""

    loss: Tensor  # mean over the valid tokens of the global batch
    grad_norm: Tensor | float  # global, before clipping; inf where the step was skipped
    skipped: bool  # the loss or the gradients were not finite, and the weights did not change
    refused: bool = False  # the gate refused the step, and the weights did not change
    micro_losses: tuple[Tensor, ...] = ()  # this rank's loss of each micro-batch; empty without the last layer
    token_weight: Tensor | None = None  # the factor on a micro-batch's summed loss: `_token_weight`

    @property
    def taken(self) -> bool:
        """True if the weights changed."""
        return not (self.skipped or self.refused)


class Engine(ABC):
    """A model under training on this rank."""

    def __init__(self, config: Config, layout: ResolvedLayout, mesh: Mesh, activity: Activity) -> None:
        self.config, self.layout, self.mesh, self.activity = config, layout, mesh, activity
        self.coordinate = mesh.coordinate(dist.get_rank())
        self._has_dropout = config.model.has_dropout
        with quiet_stdout():
            self._grid = Grid(mesh)
        self._tp = tensor_parallel_of(self._grid, config.parallel.sequence_parallel)
        # ZeRO-2 and ZeRO-3 reduce gradients as they come; ZeRO-3 gathers weights from all replicas on the way
        peers, zero_stage = activity.peers, layout.zero_stage
        self._forward_peers = peers.stage if zero_stage == 3 else peers.tensor
        self._backward_peers = peers.stage if zero_stage > 1 else peers.tensor
        self.tied_weight: TiedWeight | None = None  # whose copy another rank holds, or the copy
        self.deepspeed: Any
        self.torch_optimizer: torch.optim.Optimizer
        self.reducer: GradientReducer | None = None  # None: DeepSpeed reduces gradients

    def _initialize(self, model: torch.nn.Module) -> None:
        compile_blocks(model, self.config, torch.device(get_accelerator().current_device_name()))
        for _, parameter in named_shards(model):
            # DeepSpeed's norm counts an unmarked parameter on tensor-parallel rank 0 only, a marked one on every rank
            parameter.tensor_model_parallel = not parameter.shard.is_replicated  # type: ignore[attr-defined]
        is_ours = reduces_beside_backward(self.config)
        self.torch_optimizer = build_optimizer(
            model.parameters(),
            self.config.optimizer,
            bucket_size=self.config.parallel.gradient_bucket_size if is_ours else None,
            has_cpu_adam=self._has_cpu_adam(),
        )
        options = deepspeed_config(self.config, self.layout)
        try:
            with quiet_stdout():
                self.deepspeed, *_ = deepspeed.initialize(
                    model=model, optimizer=self.torch_optimizer, mpu=self._grid, config=options
                )
        except ValidationError as error:  # a value of the section `deepspeed`
            first = error.errors()[0]
            option = ".".join(map(str, first["loc"]))
            raise ConfigError(f"section deepspeed: DeepSpeed refuses {option}: {first['msg']}: correct it") from None
        self._balances = [balance for _, balance in expert_balances(model)]
        share_fp32_weights(self.deepspeed.optimizer)
        stay_at_smallest_loss_scale(self.deepspeed.optimizer)
        if isinstance(self.torch_optimizer, Muon):
            groups = flat_groups(self.deepspeed.optimizer)
            self.torch_optimizer.connect(groups, self.data_parallel_group(), self._tp)
        if is_ours:
            self.reducer = partition_reductions(
                self.deepspeed, model.parameters(), self.config, self.activity, self.coordinate.tensor_rank
            )

    def _has_cpu_adam(self) -> bool:
        """Returns whether the optimizer is DeepSpeed's Adam for the CPU; says so, or why it is torch's. Collective."""
        if self.config.offload.optimizer == "none" or self.config.optimizer.name != "adamw":
            return False
        reason = why_no_cpu_adam(min(BUILD_LIMIT, group_timeout() / 2))
        if dist.get_rank() == 0:
            chosen = "DeepSpeed's Adam for the CPU"
            if reason is not None:
                chosen = f"torch's fused AdamW on the CPU, as DeepSpeed's is not usable: {reason}"
            log.info(f"offload.optimizer cpu: the update is {chosen}")
        return reason is None

    @property
    @abstractmethod
    def needs_data(self) -> bool:
        """True on ranks that hold the first or the last layer."""

    @abstractmethod
    def _accumulate_gradients(self, micro_batches: Sequence[MicroBatch], weight: Tensor) -> list[Tensor]:
        """Runs forward and backward of all micro-batches; returns `StepResult.micro_losses`."""

    @abstractmethod
    def _evaluate(self, micro_batches: Sequence[MicroBatch], count: int, weight: Tensor) -> list[Tensor]:
        """Returns the loss of each micro-batch on ranks that hold the last layer."""

    @abstractmethod
    def logits(self, micro_batch: MicroBatch) -> Tensor | None:
        """`[micro_batch, seq, vocab]` in evaluation mode, on ranks that hold the head; collective over the replica.

        Every rank is given the micro-batch, which may be of any shape. All logits at once: for small batches.
        """

    @property
    @abstractmethod
    def _loss_peers(self) -> tuple[int, ...]:
        """The ranks that `_mean_loss` may wait for."""

    def _mean_loss(self, losses: Sequence[Tensor]) -> Tensor:
        """Returns the mean over the global batch of what `_accumulate_gradients` returned; collective."""
        loss = torch.stack(list(losses)).sum()
        if self.mesh.data_parallel_size > 1:
            dist.all_reduce(loss, group=self.data_parallel_group())
        return loss / self.mesh.data_parallel_size

    @torch.no_grad()
    def share_tied_weight(self) -> None:
        """Copies a tied weight to the rank that holds the copy, as every change demands; collective over the two."""
        if self.tied_weight is None:
            return
        ranks = tuple(dist.get_process_group_ranks(self.tied_weight.group))
        self.activity.record_op(Operation.UNITE_TIED_WEIGHTS, peers=ranks)
        dist.broadcast(self.tied_weight.weight.data, src=ranks[0], group=self.tied_weight.group)

    def data_parallel_group(self) -> dist.ProcessGroup:
        """Returns the group of the ranks that hold what this one holds, one per replica."""
        return self._grid.get_data_parallel_group()

    def tensor_parallel_group(self) -> dist.ProcessGroup:
        """Returns the group of the ranks that share this one's layers and samples."""
        return self._grid.get_slice_parallel_group()

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
        for group in self.torch_optimizer.param_groups:
            group["lr"] = learning_rate
        skipped_before = self.deepspeed.skipped_steps
        weight = self._token_weight(micro_batches)
        self._scale_balance_losses()
        if self.layout.zero_stage == 3:
            clear_gradient_partitions(self.deepspeed.optimizer)
        if self.reducer is not None:
            self.reducer.begin(self.layout.gradient_accumulation_steps)
        micro_losses = self._accumulate_gradients(micro_batches, weight)
        if self.reducer is not None:
            self.reducer.finish()
        loss = cache(lambda: self._mean_loss(micro_losses))
        step = GatedStep(gate, self.deepspeed.optimizer, self._tp)
        with step.open(loss):
            self.activity.record_op(Operation.OPTIMIZER, peers=self.activity.peers.everyone)
            self.deepspeed.step()
        self.share_tied_weight()
        self.activity.record_op(Operation.LOSS, peers=self._loss_peers)
        mean_loss = loss()
        skipped = self.deepspeed.skipped_steps > skipped_before and not step.refused
        norm = self.deepspeed.get_global_grad_norm()
        self.activity.record_op(Operation.FINISH, peers=self.activity.peers.everyone)
        return StepResult(mean_loss, norm, skipped, step.refused, tuple(micro_losses), weight)

    def evaluate(self, micro_batches: Sequence[MicroBatch], count: int) -> Tensor:
        """Returns the mean loss over the valid tokens of all replicas' micro-batches, `count` on each."""
        self.activity.begin_phase(Phase.EVALUATION)
        self.deepspeed.eval()
        with torch.no_grad():
            losses = self._evaluate(micro_batches, count, self._token_weight(micro_batches))
        self.deepspeed.train()
        self.activity.record_op(Operation.LOSS, peers=self._loss_peers)
        loss = self._mean_loss(losses)
        self.activity.record_op(Operation.FINISH, peers=self.activity.peers.everyone)
        return loss

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by canonical path, in the same order on ranks with the same layers."""
        yield from named_shards(self.deepspeed.module)

    def _token_weight(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Returns the factor on each micro-batch's summed loss with which the mean over replicas is the token mean."""
        valid = sum(int((batch.targets != IGNORED).sum()) for batch in micro_batches)
        total = torch.tensor(float(valid), dtype=torch.float64).to(self.deepspeed.device, torch.float32)
        if micro_batches and self.mesh.data_parallel_size > 1:
            self.activity.record_op(Operation.COUNT_TOKENS, peers=self.activity.peers.data)
            dist.all_reduce(total, group=self.data_parallel_group())
        return self.mesh.data_parallel_size / total.clamp(min=1.0)

    def _scale_balance_losses(self) -> None:
        """Makes routers add the mean over the sequences of the global batch: gradients are averaged over replicas."""
        sequences = self.config.training.global_batch_size / self.mesh.data_parallel_size  # of this replica
        loss_scale = float(getattr(self.deepspeed.optimizer, "loss_scale", 1.0))  # BF16_Optimizer has none
        for balance in self._balances:
            balance.losses, balance.scale = self.config.training.router, loss_scale / sequences

    def _first_input(self, batch: MicroBatch) -> BlockInput:
        """Builds the first layer's input: tokens, and positions and sample ids where documents or dropout need them."""
        samples = batch.samples if self._has_dropout else None
        tokens, positions, sample_ids = (
            None if array is None else torch.from_numpy(array).to(self.deepspeed.device, non_blocking=True)
            for array in (batch.tokens, batch.positions, samples)
        )
        assert tokens is not None
        starts = None if batch.positions is None else int(np.count_nonzero(batch.positions[:, 1:] == 0))
        documents = None if starts is None else len(batch.tokens) + starts
        return BlockInput(tokens, positions, sample_ids, documents)

    def _targets(self, batch: MicroBatch) -> Tensor:
        return torch.from_numpy(batch.targets).to(self.deepspeed.device, non_blocking=True)


class PlainEngine(Engine):
    """Trains a model that is not cut into stages."""

    def __init__(
        self, specs: Sequence[LayerSpec], config: Config, layout: ResolvedLayout, mesh: Mesh, activity: Activity
    ) -> None:
        super().__init__(config, layout, mesh, activity)
        self._initialize(Chunk(specs, config, self._tp, is_last=True))

    @property
    def needs_data(self) -> bool:
        return True

    @property
    def _loss_peers(self) -> tuple[int, ...]:
        return self.activity.peers.data

    def _accumulate_gradients(self, micro_batches: Sequence[MicroBatch], weight: Tensor) -> list[Tensor]:
        losses = []
        for number, batch in enumerate(micro_batches, start=1):
            loss = self._loss(number, batch, weight)
            losses.append(loss.detach())
            self.activity.record_op(Operation.BACKWARD, number, self._backward_peers)
            backward(self.deepspeed, loss)
        return losses

    def _evaluate(self, micro_batches: Sequence[MicroBatch], count: int, weight: Tensor) -> list[Tensor]:
        return [self._loss(number, batch, weight) for number, batch in enumerate(micro_batches, start=1)]

    def _loss(self, number: int, batch: MicroBatch, weight: Tensor) -> Tensor:
        self.activity.record_op(Operation.LOAD, number)
        inputs, labels = self._first_input(batch), (self._targets(batch), weight)
        self.activity.record_op(Operation.FORWARD, number, self._forward_peers)
        loss: Tensor = self.deepspeed(inputs, labels)
        return loss

    def logits(self, micro_batch: MicroBatch) -> Tensor:
        self.deepspeed.eval()
        with torch.no_grad():
            logits: Tensor = self.deepspeed(self._first_input(micro_batch))
        self.deepspeed.train()
        return logits
