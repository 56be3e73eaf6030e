"""One `train_step` over DeepSpeed's two engines, and the plain one; pipeline.py has the other.

In: micro-batches of token ids as numpy arrays. Out: the loss, the gradient norm before clipping, whether the step
was skipped. The loss and its gradient are the mean over the valid tokens of the whole global batch, however it is cut
into micro-batches and replicas: DeepSpeed averages the means of micro-batches, so each micro-batch's summed loss is
weighted by `micro-batches * replicas / valid tokens of the global batch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import deepspeed
import deepspeed.runtime.bf16_optimizer as bf16_optimizer
import numpy as np
import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor, nn

from megalite.config import Config, ConfigError, ResolvedLayout
from megalite.engine.activity import Activity, Operation, Phase
from megalite.engine.deepspeed_config import build_optimizer, deepspeed_config
from megalite.engine.deepspeed_internals import (
    quiet_stdout,
    share_fp32_weights,
    stay_at_smallest_loss_scale,
)
from megalite.engine.distributed import Grid, tensor_parallel_of
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import BlockInput, LayerSpec, MakeLayer, Payload, SerialModel, make_layer, named_shards
from megalite.parallel.loss import IGNORED, head_logits, head_loss
from megalite.parallel.mesh import Mesh

Loss = Callable[[Any, Any, TensorParallel], Tensor]  # (last layer's output, labels, group) -> scalar
Logits = Callable[[Any, TensorParallel], Tensor]  # (last layer's output, group) -> [batch, seq, vocab]


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
    token_weight: Tensor | None = None  # the factor on a micro-batch's summed loss: `_loss_scale_per_token`

    @property
    def taken(self) -> bool:
        """True if the weights changed."""
        return not (self.skipped or self.refused)


class Engine(ABC):
    """A model under training on this rank."""

    def __init__(self, config: Config, layout: ResolvedLayout, mesh: Mesh, activity: Activity) -> None:
        self.config, self.layout, self.mesh, self.activity = config, layout, mesh, activity
        self.coordinate = mesh.coordinate(dist.get_rank())
        self.deepspeed: Any
        self.torch_optimizer: torch.optim.Optimizer
        self._has_dropout = config.model.has_dropout

    def _initialize(self, model: torch.nn.Module, mpu: Any) -> None:
        for _, parameter in named_shards(model):
            # DeepSpeed's norm counts an unmarked parameter on tensor-parallel rank 0 only, a marked one on every rank
            parameter.tensor_model_parallel = not parameter.shard.is_replicated  # type: ignore[attr-defined]
        self.torch_optimizer = build_optimizer(model.parameters(), self.config.optimizer)
        options = deepspeed_config(self.config, self.layout)
        try:
            with quiet_stdout():
                self.deepspeed, *_ = deepspeed.initialize(
                    model=model, optimizer=self.torch_optimizer, mpu=mpu, config=options
                )
        except ValidationError as error:  # a value of the section `deepspeed`
            first = error.errors()[0]
            option = ".".join(map(str, first["loc"]))
            raise ConfigError(f"section deepspeed: DeepSpeed refuses {option}: {first['msg']}: correct it") from None
        share_fp32_weights(self.deepspeed.optimizer)
        stay_at_smallest_loss_scale(self.deepspeed.optimizer)

    @property
    @abstractmethod
    def needs_data(self) -> bool:
        """True on ranks that hold the first or the last layer."""

    @abstractmethod
    def _train(
        self, micro_batches: Sequence[MicroBatch], weight: Tensor, step: GatedStep
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Runs forward, backward and optimizer step inside `step.open`.

        Returns `StepResult.micro_losses` and `StepResult.loss`.
        """

    @abstractmethod
    def _evaluate(self, micro_batches: Sequence[MicroBatch], count: int, weight: Tensor) -> Tensor: ...

    @abstractmethod
    def logits(self, micro_batch: MicroBatch | None) -> Tensor | None:
        """`[micro_batch, seq, vocab]` in evaluation mode, on ranks that hold the head; collective over the replica.

        `micro_batch` is None where `needs_data` is False. All logits at once: for small batches.
        """

    @abstractmethod
    def data_parallel_group(self) -> dist.ProcessGroup:
        """The ranks that hold what this one holds, one per replica."""

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
        weight = self._loss_scale_per_token(micro_batches)
        step = GatedStep(gate, self.deepspeed.optimizer, self.deepspeed.module.tensor_parallel)
        micro_losses, loss = self._train(micro_batches, weight, step)
        skipped = self.deepspeed.skipped_steps > skipped_before and not step.refused
        norm = self.deepspeed.get_global_grad_norm()
        self.activity.record_op(Operation.FINISH, peers=self.activity.peers.everyone)
        return StepResult(loss, norm, skipped, step.refused, tuple(micro_losses), weight)

    def evaluate(self, micro_batches: Sequence[MicroBatch], count: int) -> Tensor:
        """Returns the mean loss over the valid tokens of all replicas' micro-batches, `count` on each."""
        self.activity.begin_phase(Phase.EVALUATION)
        loss = self._evaluate(micro_batches, count, self._loss_scale_per_token(micro_batches))
        self.activity.record_op(Operation.FINISH, peers=self.activity.peers.everyone)
        return loss

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by canonical path, in the same order on ranks with the same layers."""
        yield from named_shards(self.deepspeed.module)

    def _loss_scale_per_token(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Returns the factor on each micro-batch's summed loss with which DeepSpeed's average is the token mean."""
        valid = sum(int((batch.targets != IGNORED).sum()) for batch in micro_batches)
        total = torch.tensor(float(valid), dtype=torch.float64).to(self.deepspeed.device, torch.float32)
        if micro_batches and self.mesh.data_parallel_size > 1:
            self.activity.record_op(Operation.COUNT_TOKENS, peers=self.activity.peers.data)
            dist.all_reduce(total, group=self.data_parallel_group())
        return len(micro_batches) * self.mesh.data_parallel_size / total.clamp(min=1.0)

    def _feed(
        self, micro_batches: Sequence[MicroBatch], weight: Tensor
    ) -> Iterator[tuple[Payload, tuple[Tensor, Tensor]]]:
        """Yields (first layer's payload, (targets, weight)) for each micro-batch."""
        device = self.deepspeed.device
        for number, batch in enumerate(micro_batches, start=1):
            self.activity.record_op(Operation.LOAD, number)
            targets = torch.from_numpy(batch.targets).to(device, non_blocking=True)
            yield first_payload(batch, device, has_dropout=self._has_dropout), (targets, weight)


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


def layer_maker(config: Config) -> MakeLayer:
    """Returns the function that builds a layer of this run."""
    return partial(make_layer, seed=config.training.seed, initializer_range=config.model.initializer_range)


def loss_of(config: Config) -> Loss:
    """Returns the loss of a micro-batch, whose gradient is not finite either where the loss is not.

    A loss may be infinite though its gradient, softmax - one_hot, is not. Zero times it is NaN then, which reaches the
    gradients of all ranks on the usual way and needs no look at the loss, which would wait for the device.
    """
    vocab_size, softcap = config.model.vocab_size, config.model.final_logit_softcapping

    def loss(outputs: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor], tp: TensorParallel) -> Tensor:
        (hidden, head_weight), (targets, weight) = outputs, labels
        weighted = head_loss(hidden, head_weight, targets, vocab_size, tp, softcap) * weight
        if weighted.requires_grad:
            value = weighted.detach()
            weighted.register_hook(lambda gradient: gradient + 0.0 * value)
        return weighted

    return loss


def logits_of(config: Config) -> Logits:
    """Returns the function from the last layer's output to `[batch, seq, vocab]` logits."""
    vocab_size, softcap = config.model.vocab_size, config.model.final_logit_softcapping

    def logits(outputs: tuple[Tensor, Tensor], tp: TensorParallel) -> Tensor:
        hidden, head_weight = outputs
        return head_logits(hidden, head_weight, vocab_size, tp, softcap)

    return logits


def first_payload(batch: MicroBatch, device: torch.device, *, has_dropout: bool) -> Payload:
    """Builds the first layer's input: tokens, and positions and sample ids where documents or dropout need them."""
    arrays = (batch.tokens, batch.positions, batch.samples if has_dropout else None)
    parts = (None if array is None else torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)
    return BlockInput(*parts).to_payload()  # type: ignore[arg-type]  # there always are tokens
