"""DeepSpeed's way with the gradients of several backward passes: what handover.py, the engines and ZeRO-1's own reducer
and step rely on, and the defects that they work round.

A test fails when DeepSpeed accumulates in another way, or when a defect is gone. Weights do not move (learning rate 0),
so each gradient is that of a sum of products, known in closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine.deepspeed import internals as seams
from megalite.engine.deepspeed import step as step_seams
from megalite.engine.deepspeed.zero_3 import partitioned_groups
from tests.helpers.rank_pool import run_fresh_ranks

WIDTH = 5
OF_BF16 = 1e-2  # of gradients that were rounded to bf16 once


class _Parts(nn.Module):
    """Two weights, `[5, 3]` each; a forward uses those that it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.parts = nn.ModuleList(nn.Linear(3, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        """Returns the sum of all outputs, whose gradient is `x` in each row of each weight used."""
        return torch.stack([self.parts[index](x).sum() for index in used]).sum()


def _engine(zero: int, dtype: str = "fp32", **options: Any) -> Any:
    model = _Parts()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "managed_gradient_accumulation": False,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": zero, "contiguous_gradients": zero > 1, "reduce_scatter": zero != 2, **options},
        "communication_data_type": "fp32",
    }
    if dtype == "bf16":
        config |= {"bf16": {"enabled": True, "immediate_grad_update": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config)
    return engine


def _input(engine: Any, number: int) -> Tensor:
    """A vector of three, which bf16 holds exactly."""
    return torch.tensor([1.0, -2.0, 4.0]).mul(number).to(next(engine.module.parameters()).dtype)


def _norm(numbers: list[float], parts: int = 1) -> float:
    """The norm of `parts` weights whose gradient is the sum of the inputs with these numbers."""
    return abs(sum(numbers)) * (21.0 * WIDTH * parts) ** 0.5


def _backward(engine: Any, number: int, used: tuple[int, ...] = (0, 1), factor: float | None = 1.0) -> None:
    loss = engine(_input(engine, number), used)
    engine.backward(loss if factor is None else loss * factor, scale_wrt_gas=False)


def _stepped(engine: Any) -> float:
    engine.step()
    return float(engine.get_global_grad_norm())


def _norms_with_and_without_a_product(rank: int, dtype: str) -> list[float]:
    norms = []
    for factor in (None, 1.0):
        engine = _engine(1, dtype)
        for number in (1, 2, 3):
            _backward(engine, number, factor=factor)
        norms.append(_stepped(engine))
    return norms


def test_bf16_divides_the_engines_own_output_though_told_not_to() -> None:
    """runtime/engine.py: the hook on an output divides before the one that would keep it from that is registered."""
    expected = _norm([1, 2, 3], parts=2)
    ((plain, times_one),) = run_fresh_ranks(_norms_with_and_without_a_product, 1, "bf16")
    assert times_one == pytest.approx(expected, rel=OF_BF16)
    assert plain == pytest.approx(expected / 4, rel=OF_BF16), "fixed in DeepSpeed: step.backward need not multiply"


def _counted(collective: Callable[..., Any], sizes: list[int]) -> Callable[..., Any]:
    def called(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        return collective(tensor, *arguments, **options)

    return called


def _weights_in(sizes: list[int]) -> float:
    """Takes the sizes of the reductions so far and returns how often they hold all weights; without norms and flags."""
    total = sum(size for size in sizes if size > WIDTH) / (2 * 3 * WIDTH)
    sizes.clear()
    return total


def _zero_one(rank: int, dtype: str, is_taken_over: bool) -> tuple[float, list[bool], set[float]]:
    """How often a step reduced all weights, whether backward left each gradient where autograd puts it, and the numbers
    in BF16_Optimizer's sums behind the step, into which 7 was written before it."""
    engine, sizes = _engine(1, dtype), []
    optimizer = engine.optimizer
    if is_taken_over:
        seams.take_over_reduction(engine)
        optimizer.step = lambda: None  # as PartitionedStep does
    dist.all_reduce = _counted(dist.all_reduce, sizes)
    _backward(engine, 1)
    left = [parameter.grad is not None for parameter in engine.module.parameters()]
    sums = getattr(optimizer, "fp32_groups_gradients_flat", [])
    for flat in sums:
        flat.fill_(7.0)
    engine.step()
    return _weights_in(sizes), left, {number for flat in sums for number in flat.unique().tolist()}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_zero_1_leaves_gradients_to_who_takes_over_their_reduction(dtype: str) -> None:
    """It neither reduces them, nor adds them to sums of its own, nor writes zeros over these."""
    for reduced, left, sums in run_fresh_ranks(_zero_one, 2, dtype, True):
        assert not reduced, "runtime/engine.py reduces in spite of `enable_backward_allreduce`"
        assert left == [True, True], "a hook of DeepSpeed's takes gradients"
        assert sums == ({7.0} if dtype == "bf16" else set()), "runtime/bf16_optimizer.py clears its sums elsewhere"


def _offloaded(rank: int, zero: int, is_taken_over: bool) -> tuple[bool, list[bool], int, bool]:
    """Whether backward reduced weights and left each gradient where autograd puts it, the numbers in buffers that only
    DeepSpeed's reduction fills, and whether each partition has memory for its gradient."""
    engine, sizes = _engine(zero, offload_optimizer={"device": "cpu"}, contiguous_gradients=False), []
    optimizer = engine.optimizer
    if is_taken_over:
        seams.take_over_reduction(engine)
    dist.all_reduce = _counted(dist.all_reduce, sizes)
    _backward(engine, 1)
    buffers = [*optimizer.param_buffer_of_bit16_for_cpu_offload_groups, optimizer.temp_grad_buffer_for_gpu_offload]
    buffers += [optimizer.temp_grad_buffer_for_cpu_offload]
    buffers += [flat for bucket in optimizer.ipg_buckets.values() for flat in bucket.buffer]
    left = [parameter.grad is not None for parameter in engine.module.parameters()]
    has_memory = all(flat.grad is not None for flat in step_seams.flat_partitions(optimizer))
    return bool(_weights_in(sizes)), left, sum(flat.numel() for flat in buffers if flat is not None), has_memory


@pytest.mark.parametrize("zero", [1, 2])
def test_an_offloaded_optimizer_leaves_gradients_to_who_takes_over_their_reduction(zero: int) -> None:
    """It keeps memory of the host for what it updates with, and none for what it no longer reduces."""
    for seen in run_fresh_ranks(_offloaded, 2, zero, True):
        assert seen == (False, [True, True], 0, True)
    reduces = zero == 2
    for reduced, left, numbers, has_memory in run_fresh_ranks(_offloaded, 2, zero, False):
        assert (reduced, any(left), has_memory) == (reduces, not reduces, True)
        assert numbers, "no buffer is left: these lines of `take_over_reduction` can go"


def _sharded(rank: int, is_taken_over: bool) -> tuple[list[bool], int, list[list[float]], list[list[int]]]:
    """Whether a backward of ZeRO-3 left each gradient where autograd puts it, and whole; the numbers in buffers for
    gradients, this rank's weights, and those that its partitions and a parameter's part say it owns."""
    engine = _engine(3, stage3_param_persistence_threshold=0, contiguous_gradients=False)
    optimizer = engine.optimizer
    if is_taken_over:
        seams.take_over_reduction(engine)
    _backward(engine, 1)
    left = [
        parameter.grad is not None and parameter.grad.shape == (WIDTH, 3) for parameter in engine.module.parameters()
    ]
    buffer = optimizer.grad_partitions_flat_buffer
    (group,), (flat,) = partitioned_groups(optimizer), step_seams.flat_partitions(optimizer)
    parts = flat.detach().split([owned for _, _, owned in group])
    own = [parameter.ds_tensor.flatten().tolist() for parameter, _, _ in group]
    assert [part.tolist() for part in parts] == own, "sub-groups hold parameters' parts in another order"
    shapes = [[*shape, owned] for _, shape, owned in group]
    return left, 0 if buffer is None else buffer.numel(), own, shapes


def test_zero_3_leaves_gradients_to_who_takes_over_their_reduction() -> None:
    """And cuts each parameter by itself, in equal parts, of which a sub-group's flat tensor holds one after another."""
    torch.manual_seed(3)
    weights = [part.weight.detach().flatten().tolist() for part in _Parts().parts]
    first, second = run_fresh_ranks(_sharded, 2, True)
    for left, numbers, _, shapes in (first, second):
        assert left == [True, True], "DeepSpeed takes gradients"
        assert numbers == 0 and shapes == [[WIDTH, 3, 8]] * 2
    whole = [[*one, *other][: 3 * WIDTH] for one, other in zip(first[2], second[2], strict=True)]
    assert whole == weights
    for left, numbers, *_ in run_fresh_ranks(_sharded, 2, False):
        assert left == [False, False] and numbers == 16, "these lines of `take_over_reduction` can go"


def test_what_is_taken_from_zero_1_is_there() -> None:
    """Where one of these is gone, so may its part of `take_over_reduction`."""
    for reduced, left, sums in run_fresh_ranks(_zero_one, 2, "bf16", False):
        assert reduced
        assert left == [False, False], "no hook takes gradients"
        assert sums == {0.0}, "`clear_hp_grads` is not called any more"


def _geometry(rank: int, dtype: str) -> dict[str, Any]:
    engine = _engine(1, dtype)
    seams.take_over_reduction(engine)
    (group,), (partition,) = seams.flat_groups(engine.optimizer), step_seams.flat_partitions(engine.optimizer)
    values = [parameter.detach().clone() for parameter in group.parameters]
    starts = [group.start(parameter) for parameter in group.parameters]
    views = [group.weights[start : start + WIDTH * 3].view(WIDTH, 3).clone() for start in starts]
    length = len(group.weights) // 2
    own = group.weights[rank * length : (rank + 1) * length]
    is_own = torch.equal(partition.to(own.dtype), own)
    expected = (group.weights.view(2, length) + torch.tensor([[1.0], [2.0]])).flatten().to(own.dtype)
    partition.data.add_(rank + 1.0)  # on this rank alone
    engine.optimizer.update_lp_params()
    return {
        "replicas": dist.get_process_group_ranks(engine.optimizer.dp_process_group),
        "views": all(map(torch.equal, views, values)),
        "are equal parts": 2 * length == len(group.weights) and is_own,
        "sums": group.gradients is not None and group.gradients.shape == group.weights.shape,
        "shared": torch.equal(group.weights, expected),
    }


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_zero_1_cuts_flat_groups_into_equal_parts_by_rank(dtype: str) -> None:
    """Parameters are views of their group, which gets all ranks' parts from `update_lp_params`."""
    for seen in run_fresh_ranks(_geometry, 2, dtype):
        assert seen == {
            "replicas": [0, 1],
            "views": True,
            "are equal parts": True,
            "sums": dtype == "bf16",
            "shared": True,
        }
