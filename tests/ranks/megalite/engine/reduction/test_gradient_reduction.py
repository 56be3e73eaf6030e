"""The mean gradient of ZeRO-1 and ZeRO-2: its value, when it is reduced, its norm, and what a wrong one would show.

The reference is float64 on one process: the means of gradients as the ranks computed them, and torch's own AdamW and
SGD behind torch's own clipping. Buckets are so small that a model has many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.engine.engine import Engine
from megalite.engine.parameter_state import read_parameter, whole_gradients
from megalite.engine.reduction.gradient_reduction import Bucket, BucketSlice, GradientReducer
from megalite.parallel.collectives import RankGroup
from megalite.parallel.gradient_accumulation_fusion import SumsGradients
from megalite.parallel.linear import LinearLayer
from megalite.parallel.mesh import Mesh
from megalite.parallel.shard import Shard
from megalite.tracing.activity import Activity, Operation, Phase
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of, plain_optimizer
from tests.helpers.rank_pool import run_ranks

EXPERTS = {"num_experts": 6, "moe_intermediate_size": 30, "mlp_only_layers": [0]}
TIED = {"tie_word_embeddings": True}
BUCKET = 3000  # gradients; the model has 60 thousand, its embedding 6 thousand
CLIPPING = 0.05  # all gradients are larger
SGD = {"optimizer": "sgd", "learning_rate": 0.5}


class _WatchedSums:
    """The reducer as a linear layer's weight knows it, and somebody who sees the products too."""

    takes_products = True

    def __init__(self, sums: SumsGradients, see: Callable[[Tensor, Tensor], None]) -> None:
        self._sums, self._see = sums, see

    def add_product(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        self._see(parameter, grad.t() @ x)
        self._sums.add_product(parameter, grad, x)


class _Reference:
    """The optimizer of one replica's parameters in float64, on the gradients of micro-batches, summed here.

    With `by_product` GEMMs add the gradients of linear layers to their sum, as on a GPU.
    """

    def __init__(self, engine: Engine, by_product: bool) -> None:
        self.engine = engine
        self.sums: dict[Tensor, Tensor] = {}
        self.weights = {p: read_parameter(p, ())["weight"].double() for _, p in engine.parameters()}
        self.optimizer = plain_optimizer(engine, self.weights)
        layers = [module for module in engine.deepspeed.module.modules() if isinstance(module, LinearLayer)]
        added = {layer.weight for layer in layers if by_product}
        assert by_product == bool(added) and engine.reducer is not None
        for _, parameter in engine.parameters():
            if parameter in added:
                parameter.gradient_sums = _WatchedSums(engine.reducer, self._add)  # type: ignore[attr-defined]
            else:
                parameter.register_hook(lambda gradient, at=parameter: self._add(at, gradient))

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        self.sums[parameter] = self.sums.get(parameter, 0.0) + gradient.detach().double()

    def step(self, learning_rate: float) -> float:
        """Steps on the mean over the replicas, clipped by its norm, which is returned."""
        squares = torch.zeros((), dtype=torch.float64)
        for parameter, weight in self.weights.items():
            weight.grad = self.sums.pop(parameter)
            dist.all_reduce(weight.grad, group=self.engine.data_parallel_group())
            if getattr(parameter, "is_summed_at_step", False):
                assert parameter.shard.is_replicated and self.engine.config.parallel.sequence_parallel  # type: ignore[attr-defined]
                dist.all_reduce(weight.grad, group=self.engine.tensor_parallel_group())
            weight.grad /= self.engine.mesh.data_parallel_size
            if not (parameter.shard.is_replicated and self.engine.coordinate.tensor_rank):  # type: ignore[attr-defined]
                squares += weight.grad.square().sum()
        if self.engine.mesh.tensor_parallel_size > 1:
            dist.all_reduce(squares, group=self.engine.tensor_parallel_group())
        norm = float(squares.sqrt())
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        for weight in self.weights.values():
            assert weight.grad is not None
            weight.grad *= min(1.0, CLIPPING / (norm + 1e-6))
        self.optimizer.step()
        return norm


def _against_float64(rank: int, cases: list[Case], by_product: bool) -> list[dict[str, float]]:
    seen = []
    for case in cases:
        engine = engine_of(replace(case, bucket=BUCKET, clipping=CLIPPING))
        reference, worst = _Reference(engine, by_product), {"norm": 0.0, "weights": 0.0, "smallest norm": float("inf")}
        for index, batch in enumerate(global_batches(case)):
            rate = case.learning_rate / (index + 1)
            result = engine.train_step(micro_batches_of(engine, case, batch), rate)
            norm = reference.step(rate)
            worst["norm"] = max(worst["norm"], abs(float(result.grad_norm) / norm - 1))
            worst["smallest norm"] = min(worst["smallest norm"], norm)
            for parameter, weight in reference.weights.items():
                ours = read_parameter(parameter, ())["weight"].double()
                worst["weights"] = max(worst["weights"], float((ours - weight).abs().max()))
        worst["buckets"] = len(engine.torch_optimizer.param_groups)
        seen.append(worst)
        engine.deepspeed.destroy()
    return seen


# fp32: sums of a few fp32 numbers, 1e-7 each; AdamW divides by roots of squares, so that a gradient near its epsilon
# shows 1e-5 of a step of 1e-3. Summed in 16 bits a gradient has 8 bits: 2^-9 of it, and so has the norm.
CASES = [
    Case(dp=2, accumulation=2, model=TIED),
    Case(dp=2, dtype="bf16", accumulation=3, **SGD),
    Case(dp=2, dtype="bf16", reduction="bf16", **SGD),
    Case(dp=2, accumulation=2, steps=4, model=EXPERTS, **SGD),
    Case(dp=2, zero=2, accumulation=3, model=TIED),
    Case(dp=2, zero=2, dtype="bf16", reduction="bf16", accumulation=3, **SGD),
]
OF_THREE = [
    Case(dp=3, dtype="bf16", model=EXPERTS),
    Case(dp=3, **SGD),
    Case(dp=3, zero=2, dtype="bf16", accumulation=2, model=EXPERTS),
]
OF_FOUR = [
    Case(tp=2, dp=2, zero=2, accumulation=2, sequence_parallel=True, sequence=34),
    Case(tp=2, dp=2, dtype="bf16", sequence_parallel=True, sequence=34),
    Case(tp=2, dp=2, accumulation=2, **SGD),
    Case(dp=4, dtype="bf16", **SGD),
]


@pytest.mark.parametrize(
    ("cases", "by_product"),
    [
        pytest.param(CASES, False, id="two"),
        pytest.param(OF_THREE, False, id="three"),
        pytest.param(OF_FOUR, False, id="four", marks=pytest.mark.slow),
        pytest.param(CASES, True, id="two, by product"),
        pytest.param(OF_FOUR, True, id="four, by product", marks=pytest.mark.slow),
    ],
)
def test_steps_are_those_of_a_serial_float64_optimizer(cases: list[Case], by_product: bool) -> None:
    """Uneven valid tokens, experts without tokens, a clip that bites, three steps and more."""
    ranks = run_ranks(_against_float64, cases[0].world_size, cases, by_product)
    for index, case in enumerate(cases):
        for rank, seen in enumerate(each[index] for each in ranks):
            where = f"{case} rank {rank}: {seen}"
            assert seen["smallest norm"] > 2 * CLIPPING, f"the clip does not bite, {where}"
            assert seen["buckets"] > 5, where
            rounds = case.reduction == "bf16"
            assert seen["norm"] < (4e-3 if rounds else 1e-6), where
            of_a_step = case.learning_rate * (CLIPPING if case.optimizer == "sgd" else 1.0)
            assert seen["weights"] < of_a_step * (2e-3 if rounds else 2e-5) + 3e-7, where


def _begun(activity: Activity) -> int:
    """The number of buckets whose reduction this rank has begun in its present phase."""
    now = activity.now.phase_number
    reducing = [note for note in activity.notes() if note.operation is Operation.REDUCE_GRADIENTS]
    return max((note.micro_batch or 0 for note in reducing if note.phase_number == now), default=0)


class _Alone:
    """A reducer of three parameters in three buckets, without an engine."""

    def __init__(self, rank: int, world_size: int, wire: torch.dtype = torch.float32, in_rounds: bool = False) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size)) for size in (5, 7, 3)]
        self.buckets = buckets = [
            Bucket(
                [BucketSlice(parameter, 0, parameter.shape)],
                -(-parameter.numel() // world_size) * world_size,
                torch.float32,
                RankGroup(world_size, rank, dist.group.WORLD),
            )
            for parameter in self.parameters
        ]
        self.activity = Activity(Mesh(data_parallel_size=world_size), rank)
        self.reducer = GradientReducer(buckets, self.parameters, world_size, wire, self.activity, in_rounds=in_rounds)

    def backward(self, *factors: float) -> None:
        """One backward pass that gives parameter k the gradient `factors[k]`, and none where that is 0."""
        self.activity.record_op(Operation.BACKWARD)
        sum(factor * p.sum() for factor, p in zip(factors, self.parameters, strict=True) if factor).backward()  # type: ignore[union-attr]

    def begin(self, micro_batches: int) -> None:
        self.activity.begin_phase(Phase.STEP)
        self.reducer.begin(micro_batches)

    def means(self) -> list[list[float]]:
        self.reducer.finish()
        return [mean.tolist() for _, mean in whole_gradients(self.reducer)]


def _late(rank: int) -> dict[str, Any]:
    """Step 1: rank 1 has the gradients of the last parameter, which begins first, at the end. Step 2: one comes
    twice."""
    alone = _Alone(rank, 3)
    alone.begin(2)
    for _ in range(2):
        alone.backward(1.0, 2.0, 0.0 if rank == 1 else 4.0)
    begun = _begun(alone.activity)
    for _ in range(2 if rank == 1 else 0):
        alone.backward(0.0, 0.0, 4.0)
    first = alone.means()
    alone.reducer.expect_more(alone.parameters[0], 1)
    alone.begin(1)
    alone.backward(0.5 * rank, 1.0, 1.0) if rank else alone.backward(1.5, 1.0, 1.0)
    early = _begun(alone.activity)
    alone.backward(3.0, 0.0, 0.0)
    late = _begun(alone.activity)
    return {"begun": begun, "first": first, "early": early, "late": late, "second": alone.means()}


def test_what_comes_late_and_what_comes_from_elsewhere_is_waited_for() -> None:
    """The replica with a late gradient begins all reductions at the end, in the others' order; nothing of the first
    step is left in the second."""
    for rank, seen in enumerate(run_ranks(_late, 3)):
        assert seen["begun"] == (0 if rank == 1 else 3)
        assert seen["first"] == [[2.0] * 5, [4.0] * 7, [8.0] * 3]
        assert (seen["early"], seen["late"]) == (2, 3)
        assert seen["second"] == [[4.0] * 5, [1.0] * 7, [1.0] * 3]


def _rounds(rank: int) -> dict[str, Any]:
    """Three micro-batches of ZeRO-2. Rank 1 has the last parameter's gradients of two of them behind the others'."""
    alone = _Alone(rank, 3, in_rounds=True)
    alone.begin(3)
    passes = [(1.0, 2.0, 4.0), (3.0, 5.0, 7.0), (9.0, 11.0, 13.0)]
    begun, held = [], []
    for first, second, third in passes:
        alone.backward(first, second, third if rank != 1 or not begun else 0.0)
        begun.append(_begun(alone.activity))
        held.append(sum(bucket.sums is not None for bucket in alone.buckets))
    for factor in (7.0, 13.0) if rank == 1 else ():
        alone.backward(0.0, 0.0, factor)
    lengths = [0 if bucket.partition is None else len(bucket.partition) for bucket in alone.buckets]
    return {"begun": begun, "held": held, "lengths": lengths, "means": alone.means(), "all": _begun(alone.activity)}


def test_zero_2_keeps_partitions_alone_and_takes_gradients_ahead_of_their_round() -> None:
    """A flat sum lives until its bucket is on the wire; where a bucket waits, those before it may hold two rounds, and
    the next one then holds nothing of them."""
    for rank, seen in enumerate(run_ranks(_rounds, 3)):
        assert seen["means"] == [[13.0] * 5, [18.0] * 7, [24.0] * 3]
        assert seen["begun"] == ([3, 3, 3] if rank == 1 else [3, 6, 9]) and seen["all"] == 9
        assert seen["held"] == ([0, 2, 2] if rank == 1 else [0, 0, 0])
        assert seen["lengths"] == [2, 3, 1]  # a third of each


def _too_many(rank: int, last: float) -> str:
    """Two micro-batches, and a third gradient of the first parameter; `last` is the factor of the last one."""
    alone = _Alone(rank, 2)
    alone.parameters[0].shard = Shard((5,), None, (), 1, 0, name="layers.0.weight")  # type: ignore[attr-defined]
    alone.begin(2)
    alone.backward(1.0, 1.0, last)
    alone.backward(1.0, 1.0, last)
    try:
        alone.backward(1.0, 0.0, 0.0)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("last", [1.0, 0.0], ids=["reduced", "held up"])
def test_a_gradient_too_many_is_refused(last: float) -> None:
    """Also while its bucket waits for one that lacks a gradient: the sum would hold it, and be wrong."""
    for said in run_ranks(_too_many, 2, last):
        assert "a gradient of layers.0.weight of shape (5,) came" in said
        assert "parameter's number 3 of this step, for which `begin` and `expect_more` have announced 2" in said


def _too_few(rank: int) -> str:
    """Rank 1 of two gets no second gradient of the last parameter, and so begins nothing."""
    alone = _Alone(rank, 2)
    alone.parameters[2].shard = Shard((3,), None, (), 1, 0, name="layers.2.weight")  # type: ignore[attr-defined]
    alone.begin(2)
    alone.backward(1.0, 1.0, 1.0)
    alone.backward(1.0, 1.0, 1.0 - rank)
    try:
        if rank:  # the other would wait until this one has ended
            alone.means()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_gradient_that_never_comes_is_named() -> None:
    """Its replica would sum what there is, and train on it: a schedule that loses a pass shows in nothing else."""
    _, said = run_ranks(_too_few, 2)
    assert "gradients of 1 parameters never came in this step, first that of layers.2.weight of shape (3,)" in said
    assert "backward brought 1 of the 2 that" in said


def _wide(rank: int) -> list[list[float]]:
    alone = _Alone(rank, 3, torch.bfloat16)
    alone.begin(1)
    alone.backward(1 + 2**-7, 1.0, 3.0)
    return alone.means()


def test_a_mean_is_divided_after_the_sum_and_in_fp32() -> None:
    """Three times 1 + 2^-7 is 3.03125 in bf16, half of whose last digit is 2^-7; a third of that is no bf16 number."""
    for first, second, third in run_ranks(_wide, 3):
        assert first == [pytest.approx(3.03125 / 3, rel=1e-7)] * 5
        assert second == [1.0] * 7 and third == [3.0] * 3
