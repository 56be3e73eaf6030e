"""Defects to plant in a rank before it builds its engine: each a mistake that a parallel stack has had, or could have.

They patch the modules of a forked process, which ends with the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor, nn

import megalite.engine.engine as engine
import megalite.engine.pipeline as pipeline
import megalite.parallel.linear as linear
import megalite.parallel.norm as norm
import models.attention as attention
import models.decoder as decoder
import models.rope as rope
from launch.parity.observations import ArrayBlock
from megalite.parallel.collectives import TensorParallel, all_gather


def planted(defect: Callable[[], None], rank: int, *arguments: Any) -> list[ArrayBlock]:
    """What a rank with the defect runs instead of `solve`."""
    from launch.parity.rank import solve

    defect()
    return solve(rank, *arguments)


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def row_parallel_without_all_reduce() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)

    linear.RowParallelLinear.forward = forward  # type: ignore[method-assign]


def one_rank_skips_an_all_reduce() -> None:
    if dist.get_rank() == 1:
        row_parallel_without_all_reduce()


def gradient_divided_by_accumulation() -> None:
    original = engine.Engine._loss_scale_per_token

    def token_weight(self: Any, micro_batches: Any) -> Tensor:
        return original(self, micro_batches) / max(1, len(micro_batches))

    engine.Engine._loss_scale_per_token = token_weight  # type: ignore[method-assign]


def norm_drops_shards() -> None:
    original = engine.build_optimizer

    def unmarked(parameters: Any, *arguments: Any) -> Any:
        """The engine has marked the parameters by now, and DeepSpeed has not yet looked at them."""
        listed = list(parameters)
        for parameter in listed:
            parameter.tensor_model_parallel = False
        return original(listed, *arguments)

    engine.build_optimizer = unmarked


def tied_copies_go_their_own_way() -> None:
    deepspeed.runtime.pipe.engine.PipelineEngine._exec_reduce_tied_grads = lambda self: None
    instructions = deepspeed.runtime.pipe.engine.PipelineEngine._INSTRUCTION_MAP
    instructions[deepspeed.runtime.pipe.schedule.ReduceTiedGrads] = lambda self: None


def rotation_restarts_on_each_slice() -> None:
    """RoPE under sequence parallelism by the position within a rank's slice."""
    rotation, attend = rope.rotation, attention.Attention.forward
    slices = [1]

    def rotate(positions: Tensor, *rest: Any) -> Any:
        return rotation(positions % (positions.shape[-1] // slices[0]), *rest)

    def forward(self: Any, *inputs: Any) -> Tensor:
        slices[0] = self.tp.size if self.tp.sequence_is_cut else 1
        rope.fixed_rotation.cache_clear()
        return attend(self, *inputs)

    rope.rotation = attention.rotation = rotate
    attention.Attention.forward = forward  # type: ignore[method-assign]


def last_micro_batch_is_not_reduced() -> None:
    """DeepSpeed#7985: of the last micro-batch every replica's weights take the first replica's gradient."""
    factors: Iterator[float] = iter(())
    train_step, head_loss = engine.Engine.train_step, engine.head_loss

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal factors
        last = float(self.mesh.data_parallel_size) if self.coordinate.data_rank == 0 else 0.0
        factors = iter([1.0] * (self.layout.gradient_accumulation_steps - 1) + [last])
        return train_step(self, *arguments, **options)

    def loss(*arguments: Any) -> Tensor:
        value = head_loss(*arguments)
        return _ScaledGradient.apply(value, next(factors)) if torch.is_grad_enabled() else value

    engine.Engine.train_step, engine.head_loss = step, loss  # type: ignore[method-assign]


def _decay_everything(parameters: Any, options: Any) -> Any:
    groups: list[dict[str, Any]] = [{"params": list(parameters), "weight_decay": options.weight_decay}]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps)


def weight_decay_on_norms() -> None:
    engine.build_optimizer = _decay_everything


def weight_decay_on_norms_under_zero_2() -> None:
    original, initialize = engine.build_optimizer, engine.Engine._initialize

    def initialize_by_stage(self: Any, *arguments: Any) -> None:
        engine.build_optimizer = _decay_everything if self.layout.zero_stage == 2 else original
        initialize(self, *arguments)

    engine.Engine._initialize = initialize_by_stage  # type: ignore[method-assign]


class _GatherForgettingOthers(torch.autograd.Function):
    """A gathered key/value head whose gradient is this rank's alone, as of a replica that is never synchronised."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel, dim: int) -> Tensor:
        ctx.tp, ctx.dim = tp, dim
        return all_gather(x, tp, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.chunk(ctx.tp.size, dim=ctx.dim)[ctx.tp.rank].contiguous(), None, None


def stale_key_value_head() -> None:
    attention.gather_heads = lambda x, tp, dim: _GatherForgettingOthers.apply(x, tp, dim)


def norm_gradients_of_a_slice() -> None:
    norm.replicated_parameter = lambda parameter, tp: parameter


def recomputation_cuts_the_graph() -> None:
    original = decoder.recomputed

    def recomputed(function: Any, first: Tensor, *rest: Any) -> Any:
        return original(function, first.detach().requires_grad_(), *rest)

    decoder.recomputed = attention.recomputed = recomputed


def zero_3_computes_with_stale_weights() -> None:
    from launch.parity import rank

    original = rank.refresh

    def refresh(engine: Any) -> None:
        if engine.layout.zero_stage != 3:
            original(engine)

    rank.refresh = refresh


def earlier_stages_divide_by_accumulation() -> None:
    """DeepSpeed#8152: each stage scales what it sends back by 1/accumulation once more."""
    forward = pipeline.Pipeline.forward

    def scaled(self: Any, inputs: Any) -> Any:
        first, *rest = inputs if isinstance(inputs, tuple) else (inputs,)
        if first.requires_grad:
            first = _ScaledGradient.apply(first, 1 / self.micro_batches_of_a_step)
        return forward(self, (first, *rest) if rest else first)

    initialize = pipeline.PipelinedEngine._initialize

    def initialize_with_count(self: Any, model: nn.Module, mpu: Any) -> None:
        model.micro_batches_of_a_step = self.layout.gradient_accumulation_steps  # type: ignore[assignment]
        initialize(self, model, mpu)

    pipeline.Pipeline.forward = scaled  # type: ignore[method-assign]
    pipeline.PipelinedEngine._initialize = initialize_with_count  # type: ignore[method-assign]


def attention_head_of_a_neighbour() -> None:
    """Queries attend to the key/value head of the next group."""
    original = attention.Attention._whole_kv_head

    def neighbour(self: Any, qkv: Tensor) -> Tensor:
        mine = self.tp
        self.tp = dataclasses.replace(mine, rank=(mine.rank + mine.size // 2) % mine.size)
        try:
            return original(self, qkv)
        finally:
            self.tp = mine

    attention.Attention._whole_kv_head = neighbour  # type: ignore[method-assign]


def schedule_is_ignored() -> None:
    """Every step at the rate that the optimizer was built with."""
    original = engine.Engine.train_step

    def train_step(self: Any, micro_batches: Any, learning_rate: float) -> Any:
        return original(self, micro_batches, self.config.optimizer.learning_rate)

    engine.Engine.train_step = train_step  # type: ignore[method-assign]


def gradients_are_summed_in_16_bits() -> None:
    """DeepSpeed's default: replicas sum in the format of the weights, whatever that of accumulation is."""
    original = engine.deepspeed_config
    engine.deepspeed_config = lambda *arguments: original(*arguments) | {"communication_data_type": "bf16"}


def full_buckets_are_not_reduced() -> None:
    """Of the gradients only the last bucket is reduced; a model that fits in one shows nothing."""
    optimizer = deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer
    original = optimizer.average_tensor
    optimizer.average_tensor = lambda self, tensor, dtype: (
        original(self, tensor, dtype) if tensor.numel() < self.reduce_bucket_size / 2 else None
    )
