"""One `train_step` over DeepSpeed's two engines: the layer list and the config in, a training engine out.

In: micro-batches of token ids as numpy arrays. Out: the loss, the gradient norm before clipping, whether the step
was skipped. The loss and its gradient are the mean over the valid tokens of the whole global batch, however it is cut
into micro-batches and replicas: DeepSpeed averages the means of micro-batches, so each micro-batch's summed loss is
weighted by `micro-batches * replicas / valid tokens of the global batch`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.config import Config, ResolvedLayout
from megalite.engine.activity import Activity, Operation
from megalite.engine.deepspeed_config import deepspeed_config
from megalite.engine.distributed import share_timeout
from megalite.engine.optimizer import build_optimizer
from megalite.engine.pipeline import Pipeline, note_schedule
from megalite.engine.plain import PlainModel
from megalite.engine.seams import (
    asked_before_update,
    loss_computed_once,
    micro_batch_losses,
    quiet_stdout,
    share_fp32_weights,
    stay_at_smallest_loss_scale,
    tied_weights,
)
from megalite.engine.topology import Grid, tensor_parallel_of
from megalite.engine.verdict import Judge, Verdict, with_unsafe_gradient
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import LayerSpec, Payload, make_layer, named_shards
from megalite.parallel.loss import IGNORED, head_logits, head_loss
from megalite.parallel.mesh import Mesh


class MicroBatch(Protocol):
    """What an engine is fed: one forward's worth of samples."""

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
    """One optimizer step, equal on all ranks; tensors, so that nobody waits for the device until a number is read."""

    loss: Tensor  # mean over the valid tokens of the global batch
    grad_norm: Tensor | float  # global, before clipping; inf where the step was skipped
    skipped: bool  # True where the loss or the gradients were not finite and the weights stayed
    refused: bool = False  # True where a judge did not take the step and the weights stayed
    micro_losses: tuple[Tensor, ...] = ()  # this rank's, of each micro-batch; empty on ranks without the last layer
    token_weight: Tensor | None = None  # what the sum over a micro-batch's valid tokens was multiplied with

    @property
    def taken(self) -> bool:
        """Whether the weights changed."""
        return not (self.skipped or self.refused)


class Engine(ABC):
    """A model under training on this rank."""

    def __init__(self, config: Config, layout: ResolvedLayout, mesh: Mesh, activity: Activity) -> None:
        self.config, self.layout, self.mesh, self.activity = config, layout, mesh, activity
        self.coordinate = mesh.coordinate(dist.get_rank())
        self.deepspeed: Any
        self.torch_optimizer: torch.optim.Optimizer
        self._loss: Callable[[], Tensor]  # of the step, once its last forward has run: collective, computed once

    def _initialize(self, model: torch.nn.Module, mpu: Any) -> None:
        self.torch_optimizer = build_optimizer(model.parameters(), self.config.optimizer)
        with quiet_stdout():
            self.deepspeed, *_ = deepspeed.initialize(
                model=model,
                optimizer=self.torch_optimizer,
                mpu=mpu,
                config=deepspeed_config(self.config, self.layout),
            )
        share_fp32_weights(self.deepspeed.optimizer)
        stay_at_smallest_loss_scale(self.deepspeed.optimizer)

    @property
    @abstractmethod
    def needs_data(self) -> bool:
        """True on ranks that hold the first or the last layer."""

    @abstractmethod
    def _train(self, micro_batches: Sequence[MicroBatch], weight: Tensor) -> Sequence[Tensor]:
        """Forward, backward and optimizer step; returns `StepResult.micro_losses` and leaves `_loss` behind."""

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
        self, micro_batches: Sequence[MicroBatch], learning_rate: float, judge: Judge | None = None
    ) -> StepResult:
        """One optimizer step over this replica's micro-batches; an empty sequence where `needs_data` is False.

        A step whose loss or gradients are not finite changes nothing, nor does one that `judge` does not take.
        """
        for group in self.torch_optimizer.param_groups:
            group["lr"] = learning_rate
        skipped_before = self.deepspeed.skipped_steps
        weight = self._token_weight(micro_batches)
        verdict = Verdict(judge, self._common_loss)
        with asked_before_update(self.deepspeed.optimizer, verdict.refuses) if judge is not None else nullcontext():
            micro_losses = self._train(micro_batches, weight)
        skipped = self.deepspeed.skipped_steps > skipped_before and not verdict.refused
        norm = self.deepspeed.get_global_grad_norm()
        loss = self._loss()
        self.activity.note(Operation.FINISH, peers=self.activity.peers.everyone)
        return StepResult(loss, norm, skipped, verdict.refused, tuple(micro_losses), weight)

    def _common_loss(self) -> float:
        """The step's loss, the same bits on all ranks: tensor-parallel ranks each compute their own."""
        loss, tp = self._loss(), self.deepspeed.module.tensor_parallel
        if tp.size > 1:
            dist.broadcast(loss, src=dist.get_global_rank(tp.group, 0), group=tp.group)
        return float(loss)

    def evaluate(self, micro_batches: Sequence[MicroBatch], count: int) -> Tensor:
        """Mean loss over the valid tokens of all replicas' micro-batches, `count` on each; nothing is trained."""
        loss = self._evaluate(micro_batches, count, self._token_weight(micro_batches))
        self.activity.note(Operation.FINISH, peers=self.activity.peers.everyone)
        return loss

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """This rank's parameters by canonical path, in the same order on ranks with the same layers."""
        yield from named_shards(self.deepspeed.module)

    def _token_weight(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """What a micro-batch's summed loss is multiplied with, so that DeepSpeed's means end in the token mean."""
        valid = sum(int((batch.targets != IGNORED).sum()) for batch in micro_batches)
        total = torch.tensor(float(valid), dtype=torch.float64).to(self.deepspeed.device, torch.float32)
        if micro_batches and self.mesh.data_parallel_size > 1:
            self.activity.note(Operation.COUNT_TOKENS, peers=self.activity.peers.data)
            dist.all_reduce(total, group=self.data_parallel_group())
        return len(micro_batches) * self.mesh.data_parallel_size / total.clamp(min=1.0)

    def _feed(
        self, micro_batches: Sequence[MicroBatch], weight: Tensor
    ) -> Iterator[tuple[Payload, tuple[Tensor, Tensor]]]:
        """(first layer's payload, (targets, weight)) per micro-batch."""
        device = self.deepspeed.device
        for number, batch in enumerate(micro_batches, start=1):
            self.activity.note(Operation.LOAD, number)
            targets = torch.from_numpy(batch.targets).to(device, non_blocking=True)
            yield first_payload(batch, device, has_dropout=self.config.model.has_dropout), (targets, weight)


class PlainEngine(Engine):
    """PP = 1 on DeepSpeed's plain engine."""

    def __init__(
        self, specs: Sequence[LayerSpec], config: Config, layout: ResolvedLayout, mesh: Mesh, activity: Activity
    ) -> None:
        super().__init__(config, layout, mesh, activity)
        with quiet_stdout():
            self._grid = Grid(mesh)
        tp = tensor_parallel_of(self._grid, config.parallel.sequence_parallel)
        model = PlainModel(specs, tp, _layer_maker(config), _loss_of(config), _logits_of(config))
        _mark_for_norm(model)
        self._initialize(model, self._grid)
        # ZeRO-3 gathers weights from all replicas on the way
        self._forward_peers = activity.peers.stage if layout.zero_stage == 3 else activity.peers.tensor

    @property
    def needs_data(self) -> bool:
        return True

    def data_parallel_group(self) -> dist.ProcessGroup:
        return self._grid.get_data_parallel_group()

    def _train(self, micro_batches: Sequence[MicroBatch], weight: Tensor) -> Sequence[Tensor]:
        total, losses = torch.zeros((), device=self.deepspeed.device), []
        self._loss = cache(lambda: self._mean_over_replicas(total / len(micro_batches)))
        note, peers = self.activity.note, self.activity.peers
        for number, (inputs, labels) in enumerate(self._feed(micro_batches, weight), start=1):
            note(Operation.FORWARD, number, self._forward_peers)
            loss = self.deepspeed(inputs, labels)
            losses.append(loss.detach())
            total += losses[-1]
            note(Operation.BACKWARD, number, peers.stage)  # ZeRO sums gradients as they come
            self.deepspeed.backward(loss)
            note(Operation.OPTIMIZER, number, peers.everyone)
            self.deepspeed.step()
        note(Operation.LOSS, peers=peers.loss)
        return losses

    def _evaluate(self, micro_batches: Sequence[MicroBatch], count: int, weight: Tensor) -> Tensor:
        self.deepspeed.eval()
        losses = []
        with torch.no_grad():
            for number, fed in enumerate(self._feed(micro_batches, weight), start=1):
                self.activity.note(Operation.FORWARD, number, self._forward_peers)
                losses.append(self.deepspeed(*fed))
        self.deepspeed.train()
        self.activity.note(Operation.LOSS, peers=self.activity.peers.loss)
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


class PipelinedEngine(Engine):
    """PP > 1 on DeepSpeed's pipeline engine."""

    def __init__(
        self, specs: Sequence[LayerSpec], config: Config, layout: ResolvedLayout, mesh: Mesh, activity: Activity
    ) -> None:
        super().__init__(config, layout, mesh, activity)
        sequence_parallel = config.parallel.sequence_parallel
        with quiet_stdout():
            model = Pipeline(specs, mesh, sequence_parallel, _layer_maker(config), _loss_of(config))
        _mark_for_norm(model)
        self._initialize(model, None)
        note_schedule(self.deepspeed, activity)

    @property
    def needs_data(self) -> bool:
        return self.coordinate.pipeline_rank in (0, self.mesh.pipeline_parallel_size - 1)

    def data_parallel_group(self) -> dist.ProcessGroup:
        return self.deepspeed.grid.get_data_parallel_group()

    def _train(self, micro_batches: Sequence[MicroBatch], weight: Tensor) -> Sequence[Tensor]:
        with loss_computed_once(self.deepspeed) as self._loss:
            self.deepspeed.train_batch(self._feed(micro_batches, weight))
        self._unite_tied_weights()
        return micro_batch_losses(self.deepspeed)

    @torch.no_grad()
    def _unite_tied_weights(self) -> None:
        """The first stage's copy for all: stages sum the same gradients at other places of a buffer, in another order,
        and would drift apart by a rounding per step."""
        for weight, group in tied_weights(self.deepspeed.module):
            self.activity.note(Operation.UNITE_TIED_WEIGHTS, peers=tuple(dist.get_process_group_ranks(group)))
            dist.broadcast(weight.data, src=dist.get_global_rank(group, 0), group=group)

    def _evaluate(self, micro_batches: Sequence[MicroBatch], count: int, weight: Tensor) -> Tensor:
        feed = self._feed(micro_batches, weight)
        self.activity.note(Operation.MEET, peers=self.activity.peers.everyone)  # eval_batch begins with a barrier
        loss: Tensor = self.deepspeed.eval_batch(feed, num_micro_batches=count)
        return loss.squeeze()

    def logits(self, micro_batch: MicroBatch | None) -> Tensor | None:
        weight = torch.zeros((), device=self.deepspeed.device)
        feed = self._feed([] if micro_batch is None else [micro_batch], weight)
        _, outputs = self.deepspeed.eval_batch(feed, return_logits=True, num_micro_batches=1)
        if outputs is None:
            return None
        with torch.no_grad():
            return _logits_of(self.config)(outputs, self.deepspeed.module.tensor_parallel)


def build_engine(
    specs: Sequence[LayerSpec], config: Config, layout: ResolvedLayout, activity: Activity | None = None
) -> Engine:
    """The engine that `layout` asks for. torch.distributed must have been started with `layout.world_size` ranks.

    What the engine does is noted in `activity`, of the same layout; in one of its own where none is given.
    """
    mesh = Mesh.of(layout)
    kind = PipelinedEngine if mesh.pipeline_parallel_size > 1 else PlainEngine
    engine = kind(specs, config, layout, mesh, activity or Activity(mesh, dist.get_rank()))
    share_timeout()
    return engine


def _layer_maker(config: Config) -> Any:
    return partial(make_layer, seed=config.training.seed, initializer_range=config.model.initializer_range)


def _loss_of(config: Config) -> Any:
    vocab_size, softcap = config.model.vocab_size, config.model.final_logit_softcapping

    def loss(outputs: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor], tp: TensorParallel) -> Tensor:
        (hidden, head_weight), (targets, weight) = outputs, labels
        return with_unsafe_gradient(head_loss(hidden, head_weight, targets, vocab_size, tp, softcap) * weight)

    return loss


def _logits_of(config: Config) -> Any:
    vocab_size, softcap = config.model.vocab_size, config.model.final_logit_softcapping

    def logits(outputs: tuple[Tensor, Tensor], tp: TensorParallel) -> Tensor:
        hidden, head_weight = outputs
        return head_logits(hidden, head_weight, vocab_size, tp, softcap)

    return logits


def _mark_for_norm(model: torch.nn.Module) -> None:
    """DeepSpeed counts an unmarked parameter on tensor-parallel rank 0 only, a marked one on every rank."""
    for _, parameter in named_shards(model):
        parameter.tensor_model_parallel = not parameter.shard.is_replicated  # type: ignore[attr-defined]


def first_payload(batch: MicroBatch, device: torch.device, *, has_dropout: bool) -> Payload:
    """What the first layer takes: tokens, and what rides along to all stages because documents or dropout need it."""
    arrays = [batch.tokens, batch.positions, batch.samples if has_dropout else None]
    parts = [torch.from_numpy(array).to(device, non_blocking=True) for array in arrays if array is not None]
    return parts[0] if len(parts) == 1 else tuple(parts)
