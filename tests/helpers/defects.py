"""Defects to plant in a rank before it builds its engine: each a mistake that a parallel stack has had, or could have.

They patch the modules of a forked process, which ends with the layout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megalite.engine.engine as engine
import megalite.engine.initialization as initialization
import megalite.engine.pipeline.pipelined as pipelined
import megalite.engine.pipeline.tying as tying
import megalite.engine.stages as stages
import megalite.parallel.context as context
import megalite.parallel.expert_dispatch as expert_dispatch
import megalite.parallel.linear as linear
import megalite.parallel.norm as norm
import models.attention as attention
import models.attention_inputs as attention_inputs
import models.decoder as decoder
import models.rope as rope
from launch.parity.observations import ArrayBlock
from megalite.engine.pipeline.pipeline_runtime import ProgramRun
from megalite.engine.reduction.gradient_reduction import GradientReducer
from megalite.engine.reduction.partitioned_step import PartitionedStep
from megalite.engine.statistics.source_losses import SourceLosses
from megalite.parallel.collectives import Begun, TensorParallel, all_gather, parameter_in_parallel_region
from megalite.schedules.program import Compute, Message, MessageKind, Receive


def planted(defect: Callable[[], None], rank: int, *arguments: Any) -> list[ArrayBlock]:
    """What a rank with the defect runs instead of `solve`."""
    from launch.parity.rank import solve

    defect()
    return solve(rank, *arguments)


def row_parallel_without_all_reduce() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)

    linear.RowParallelLinear.forward = forward  # type: ignore[method-assign]


def one_rank_skips_an_all_reduce() -> None:
    if dist.get_rank() == 1:
        row_parallel_without_all_reduce()


def gradient_divided_by_accumulation() -> None:
    original = engine.Engine._token_weight

    def token_weight(self: Any, micro_batches: Any) -> Tensor:
        return original(self, micro_batches) / max(1, len(micro_batches))

    engine.Engine._token_weight = token_weight  # type: ignore[method-assign]


def norm_drops_shards() -> None:
    original = initialization.build_optimizer

    def unmarked(parameters: Any, *arguments: Any, **options: Any) -> Any:
        """The engine has marked the parameters by now, and DeepSpeed has not yet looked at them."""
        listed = list(parameters)
        for parameter in listed:
            parameter.tensor_model_parallel = False
        return original(listed, *arguments, **options)

    initialization.build_optimizer = unmarked


def tied_copies_go_their_own_way() -> None:
    """The head computes with the embedding's initial weight for ever."""
    tying.TiedWeight.share = lambda self: None  # type: ignore[method-assign]


def tied_gradient_is_forgotten() -> None:
    """What the head's copy has collected never reaches the embedding."""
    pipelined.PipelinedEngine._hand_over_tied_gradient = lambda self: None  # type: ignore[method-assign]


def rotation_restarts_on_each_slice() -> None:
    """RoPE under sequence parallelism by the position within a rank's slice."""
    rotation, shared_inputs = rope.rotation, attention.Attention.shared_inputs
    slices = [1]

    def rotate(positions: Tensor, *rest: Any) -> Any:
        return rotation(positions % (positions.shape[-1] // slices[0]), *rest)

    def sliced(self: Any, x: Any) -> Any:
        slices[0] = self.tp.size if self.tp.sequence_is_cut else 1
        rope.fixed_rotation.cache_clear()
        return shared_inputs(self, x)

    rope.rotation = attention_inputs.rotation = rotate
    attention.Attention.shared_inputs = sliced  # type: ignore[method-assign]


def last_micro_batch_is_not_reduced() -> None:
    """DeepSpeed#7985: of the last micro-batch every replica's weights take the first replica's gradient."""
    factors: Iterator[float] = iter(())
    train_step, head_loss = engine.Engine.train_step, stages.head_loss

    def step(self: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal factors
        last = float(self.mesh.replicas) if self.coordinate.replica == 0 else 0.0
        factors = iter([1.0] * (self.layout.gradient_accumulation_steps - 1) + [last])
        return train_step(self, *arguments, **options)

    def loss(*arguments: Any) -> Tensor:
        with torch.no_grad():
            value = head_loss(*arguments)
        if not torch.is_grad_enabled():
            return value
        *others, weight = arguments
        scaled = head_loss(*others, weight * next(factors))
        return scaled + (value - scaled.detach())  # backward begins with 1, as the head's sum wants it

    engine.Engine.train_step, stages.head_loss = step, loss  # type: ignore[method-assign]


def _decay_everything(parameters: Any, options: Any, **_: Any) -> Any:
    groups: list[dict[str, Any]] = [{"params": list(parameters), "weight_decay": options.weight_decay}]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate, fused=True)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps, fused=True)


def weight_decay_on_norms() -> None:
    initialization.build_optimizer = _decay_everything


def weight_decay_on_norms_under_zero_2() -> None:
    original, initialize = initialization.build_optimizer, engine.Engine._initialize

    def initialize_by_stage(self: Any, *arguments: Any) -> None:
        initialization.build_optimizer = _decay_everything if self.layout.zero_stage == 2 else original
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
    GradientReducer._sum_in_tensor_group = lambda self: None  # type: ignore[method-assign]


def norm_gradients_are_summed_twice() -> None:
    """In the backward of every micro-batch and once more at the end of the step."""
    make, original = norm.RMSNorm.__init__, norm.RMSNorm.normalize

    def made(self: Any, hidden_size: int, eps: float, tp: TensorParallel) -> None:
        make(self, hidden_size, eps, tp)
        if tp.sequence_is_cut:
            self.normalize = lambda eps, x, weight: original(eps, x, parameter_in_parallel_region(weight, tp))

    norm.RMSNorm.__init__ = made  # type: ignore[method-assign]


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
    """Each stage scales what it sends back by 1/accumulation once more, as DeepSpeed's pipeline engine did (#8152)."""
    run, send = ProgramRun.run, ProgramRun._send

    def counted(self: Any, program: Any) -> Any:
        forwards = {each.micro_batch for each in program if isinstance(each, Compute)}
        self.micro_batches = len(forwards)
        return run(self, program)

    def scaled(self: Any, message: Message) -> None:
        if message.kind is MessageKind.GRADIENT:
            self._results[message.kind, message.position, message.micro_batch].div_(self.micro_batches)
        send(self, message)

    ProgramRun.run, ProgramRun._send = counted, scaled  # type: ignore[method-assign]


def hand_over_is_dropped() -> None:
    """The first stage computes no gradients of the first micro-batch."""
    original = ProgramRun._backward

    def backward(self: Any, action: Compute) -> None:
        if (action.position, action.micro_batch) != (0, 0):
            original(self, action)
            return
        self._taken(action.needs)
        del self._alive[0, 0]

    ProgramRun._backward = backward  # type: ignore[method-assign]


def gradient_is_handed_over_twice() -> None:
    """Of the weights whose gradients were put off, as one gradient that is twice its size: sums refuse one too many."""
    original = ProgramRun._weight_gradients

    def weight_gradients(self: Any, action: Compute) -> None:
        if action.micro_batch == 0:
            products = self._put_off[action.position, 0]
            products[:] = [product._replace(grad=2 * product.grad) for product in products]
        original(self, action)

    ProgramRun._weight_gradients = weight_gradients  # type: ignore[method-assign]


def messages_are_taken_in_the_wrong_order() -> None:
    """A stage begins to receive the first two activations of a step the other way round."""
    original = ProgramRun.run

    def run(self: Any, program: Any) -> Any:
        actions = list(program)
        first = [
            place
            for place, each in enumerate(actions)
            if isinstance(each, Receive) and each.message.kind is MessageKind.ACTIVATION
        ][:2]
        for place, other in zip(first, reversed(first), strict=True):
            actions[place] = program[other]
        return original(self, tuple(actions))

    ProgramRun.run = run  # type: ignore[method-assign]


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
    """Replicas sum in the format of the weights, whatever that of accumulation is."""
    begin = GradientReducer.begin

    def begin_in_bf16(self: Any, micro_batches: int) -> None:
        self._wire_dtype = torch.bfloat16
        begin(self, micro_batches)

    GradientReducer.begin = begin_in_bf16  # type: ignore[method-assign]


def first_bucket_is_not_reduced() -> None:
    """Each replica takes its own part of the first bucket from its own sum."""
    start = GradientReducer._start

    def start_alone(self: Any, bucket: Any) -> None:
        is_first, size = bucket is self._order[0], self._size
        self._size = 1 if is_first else size
        start(self, bucket)
        self._size = size
        if is_first:
            bucket.partition = bucket.own(bucket.partition)

    GradientReducer._start = start_alone  # type: ignore[method-assign]


def norm_of_the_first_partition() -> None:
    """Each replica adds the squares of the first one's partition, of which it has only its own gradients."""
    original = PartitionedStep._measure_norms

    def gradient_norm(self: Any) -> Tensor:
        buckets = self.reducer.buckets
        own = [bucket.partition for bucket in buckets]
        for bucket in buckets:
            bucket.partition = bucket.sums[: len(bucket.partition)]
        norm = original(self)
        for bucket, partition in zip(buckets, own, strict=True):
            bucket.partition = partition
        return norm

    PartitionedStep._measure_norms = gradient_norm  # type: ignore[method-assign]


def token_weight_of_the_batch_before() -> None:
    """The first step of another batch divides by the valid tokens of the one before."""
    original = engine.Engine._token_weight
    before: dict[int, tuple[Any, Tensor]] = {}

    def token_weight(self: Any, micro_batches: Any) -> Tensor:
        weight = original(self, micro_batches)
        shape, old = before.get(id(self), (self.shape, weight))
        before[id(self)] = self.shape, weight
        return weight if shape == self.shape else old

    engine.Engine._token_weight = token_weight  # type: ignore[method-assign]


def source_losses_of_the_last_micro_batch() -> None:
    """What came before is forgotten."""
    original = SourceLosses.add

    def add(self: Any, *arguments: Any) -> None:
        self.sums[0].zero_()
        original(self, *arguments)

    SourceLosses.add = add  # type: ignore[method-assign]


def chunks_of_neighbours_are_exchanged() -> None:
    """Gathered keys and values in the order of the ranks' chunks, as if none had one from the sequence's end."""
    gather = context._GatherTokens.forward

    def forward(ctx: Any, x: Tensor, cp: Any) -> Tensor:
        early, *middle, late = gather(ctx, x, cp).chunk(context.chunks(cp), dim=1)
        return torch.cat([early, *middle[::-1], late], dim=1)

    context._GatherTokens.forward = forward  # type: ignore[assignment]


def positions_begin_on_each_rank() -> None:
    """RoPE by the place within a rank's part of the sequence."""

    def places(length: int, cp: Any, device: torch.device) -> Tensor:
        return torch.arange(length // cp.size, device=device)

    attention_inputs.sequence_places = places


def each_part_of_a_sequence_has_a_weight() -> None:
    """The mean over valid tokens is taken over replicas that have samples of their own."""
    token_weight = engine.Engine._token_weight

    def weight(self: Any, micro_batches: Any) -> Tensor:
        return token_weight(self, micro_batches) / self.mesh.context_parallel_size

    engine.Engine._token_weight = weight  # type: ignore[method-assign]


def key_gradients_are_not_reduced() -> None:
    """A rank keeps what its own queries contribute to the gradients of its keys and values."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        spans = context.own_spans(grad.shape[1], ctx.cp)
        return torch.cat([grad[:, at.start : at.stop] for at in spans], dim=1), None

    context._GatherTokens.backward = backward  # type: ignore[assignment]


def tokens_come_back_to_a_neighbour() -> None:
    """Outputs of experts return one place late."""
    original = expert_dispatch.RowMessages.to_tokens

    def late(self: Any, rows: Tensor) -> Begun:
        return Begun(original(self, rows).wait().roll(1, 0), None)

    expert_dispatch.RowMessages.to_tokens = late  # type: ignore[method-assign]


def an_expert_has_a_row_of_its_neighbour() -> None:
    """The count of a rank's first expert is off by one."""
    original = expert_dispatch._exchanged_counts

    def counts(*arguments: Any) -> Any:
        messages, order, ends = original(*arguments)
        ends[0] = (ends[0] - 1).clamp(min=0)
        return messages, order, ends

    expert_dispatch._exchanged_counts = counts


def experts_are_summed_over_all_replicas() -> None:
    """As if all of them had the same ones."""
    start = GradientReducer._start

    def start_everywhere(self: Any, bucket: Any) -> None:
        if bucket.replicas.size < self._size:
            whole = next(one.replicas for one in self.buckets if one.replicas.size == self._size)
            dist.all_reduce(bucket.open(self.device), group=whole.group)
        start(self, bucket)

    GradientReducer._start = start_everywhere  # type: ignore[method-assign]


def norm_counts_experts_once_for_each_rank() -> None:
    """The squares of dealt experts count as often as ranks have a part of them."""
    original = initialization.build_optimizer

    def marked(parameters: Any, *arguments: Any, **options: Any) -> Any:
        listed = list(parameters)
        for parameter in listed:
            if parameter.shard.is_dealt:
                parameter.tensor_model_parallel = parameter.shard.expert_parallel_size
        return original(listed, *arguments, **options)

    initialization.build_optimizer = marked
