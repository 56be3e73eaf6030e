"""Codes between real replicas: nothing is lost on the way, and steps are those of a float64 optimizer on what is told.

The exact gradients are summed here, in float64, as the ranks compute them. What replicas told so far and what they
still owe must add up to their mean, in each step and for each number; torch's own optimizers behind torch's own
clipping, in float64, are given what was told. Weights lag behind by what a code rounds, and are equal everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.checkpoint.engine_state import UNTOLD, load_engine
from megalite.checkpoint.manifest import step_folder
from megalite.checkpoint.reader import CheckpointReader
from megalite.engine.compression.gradients import CompressedReducer
from megalite.engine.engine import Engine
from megalite.engine.parameter_state import read_parameter, reading_gradients
from megalite.resilience.replica_check import find_disagreements
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of, plain_optimizer
from tests.helpers.rank_pool import run_ranks
from tests.helpers.saving import save

CLIPPING = 0.05  # all gradients are larger
SGD = {"optimizer": "sgd", "learning_rate": 0.5}
SMALL: dict[str, Any] = {"bucket": 3000, "clipping": CLIPPING, "steps": 4}
INT8, INT4, TOP_K = {"gradients": "int8"}, {"gradients": "int4"}, {"gradients": "top_k", "density": 0.1}
WEIGHTS = {"weights": "int8"}
EXPERTS = {"num_experts": 6, "moe_intermediate_size": 30}


class _Reference:
    """Of one rank: its own gradients, those that were told, and the weights after steps on them; in float64."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        parameters = [parameter for _, parameter in engine.parameters()]
        self.own = {p: torch.zeros(p.shape, dtype=torch.float64) for p in parameters}
        self.told = {p: torch.zeros(p.shape, dtype=torch.float64) for p in parameters}
        self.weights = {p: read_parameter(p, ())["weight"].double() for p in parameters}
        self.optimizer = plain_optimizer(engine, self.weights)
        for parameter in parameters:
            parameter.register_hook(lambda gradient, at=parameter: self._add(at, gradient))

    def _add(self, parameter: Tensor, gradient: Tensor) -> None:
        self.own[parameter] += gradient.detach().double()

    def take(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.weights[parameter].grad = gradient.double()
        self.told[parameter] += gradient.double()

    def step(self, rate: float) -> float:
        """Steps on what was told, clipped by its norm, which is returned."""
        squares = torch.zeros((), dtype=torch.float64)
        for parameter, weight in self.weights.items():
            assert weight.grad is not None
            if not (parameter.shard.is_replicated and self.engine.coordinate.tensor_rank):  # type: ignore[attr-defined]
                of_experts = self._replicas(parameter) != self.engine.data_parallel_group()
                copies = dist.get_world_size(self._replicas(parameter)) if of_experts else self.engine.mesh.replicas
                squares += weight.grad.square().sum() / copies
        dist.all_reduce(squares)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        for weight in self.weights.values():
            weight.grad *= min(1.0, CLIPPING / (float(squares.sqrt()) + 1e-6))
        self.optimizer.step()
        return float(squares.sqrt())

    def lost(self) -> float:
        """Returns the largest difference between what is told or owed and the exact sum, over the largest number of
        the parameter."""
        reducer, worst = self.engine.reducer, 0.0
        assert isinstance(reducer, CompressedReducer)
        for bucket in reducer.buckets:
            exchange = reducer.exchanges.get(id(bucket))
            for one in bucket.slices:
                owed = torch.zeros(one.shape) if exchange is None else one.view_of(exchange.untold)
                both = torch.stack([self.own[one.parameter], owed.double()])
                dist.all_reduce(both, group=self._replicas(one.parameter))
                if getattr(one.parameter, "is_summed_at_step", False):
                    dist.all_reduce(both, group=self.engine.tensor_parallel_group())
                exact, left = both / self.engine.mesh.replicas
                worst = max(worst, float((self.told[one.parameter] + left - exact).abs().max() / exact.abs().max()))
        return worst

    def _replicas(self, parameter: Tensor) -> Any:
        reducer = self.engine.reducer
        bucket = next(each for each in reducer.buckets if any(one.parameter is parameter for one in each.slices))
        return bucket.replicas.group


def _trained(rank: int, cases: list[Case]) -> list[dict[str, float]]:
    seen = []
    for case in cases:
        engine = engine_of(case)
        reference, worst = _Reference(engine), dict.fromkeys(("norm", "weights", "lost"), 0.0)
        worst |= {"smallest norm": float("inf"), "weights behind": 0.0}
        for index, batch in enumerate(global_batches(case)):
            rate = case.learning_rate / (index + 1)
            before = {p: read_parameter(p, ())["weight"].double() for _, p in engine.parameters()}
            with reading_gradients(engine, reference.take):
                result = engine.train_step(micro_batches_of(engine, case, batch), rate)
            norm = reference.step(rate)
            worst["norm"] = max(worst["norm"], abs(float(result.grad_norm) / norm - 1))
            worst["smallest norm"] = min(worst["smallest norm"], norm)
            worst["lost"] = max(worst["lost"], reference.lost())
            for _, parameter in engine.parameters():
                weight = reference.weights[parameter]
                ours = read_parameter(parameter, ())["weight"].double()
                worst["weights"] = max(worst["weights"], float((ours - weight).abs().max()))
                rounding = 2**-8 * ours.abs() if case.dtype == "bf16" else torch.tensor(1e-7)
                behind = (parameter.detach().double() - ours).abs() - rounding
                changed = (ours - before[parameter]).abs().max() + rounding.max()  # what was rounded before is told too
                worst["weights behind"] = max(worst["weights behind"], float(behind.max() / changed))
        worst["disagreements"] = len(find_disagreements(engine))
        seen.append(worst)
        engine.deepspeed.destroy()
    return seen


OF_TWO = [
    Case(dp=2, accumulation=2, **SMALL, compression=INT8 | WEIGHTS),
    Case(dp=2, dtype="bf16", **SMALL, **SGD, compression=INT4),
    Case(dp=2, accumulation=2, **SMALL, **SGD, compression=TOP_K),
]
OF_FOUR = [
    Case(tp=2, dp=2, **SMALL, sequence_parallel=True, sequence=34, compression=INT4 | WEIGHTS),
    Case(pp=2, dp=2, dtype="bf16", accumulation=2, **SMALL, **SGD, compression=INT8 | WEIGHTS),
    Case(dp=2, cp=2, sequence=36, **SMALL, compression=TOP_K),
    Case(dp=4, ep=2, **SMALL, model=EXPERTS, compression=INT8 | WEIGHTS),
    Case(dp=4, **SMALL, **SGD, compression=INT8),
]


@pytest.mark.parametrize("cases", [OF_TWO, pytest.param(OF_FOUR, marks=pytest.mark.slow)], ids=["two", "four"])
def test_what_replicas_tell_and_owe_is_the_mean_and_they_step_on_what_was_told(cases: list[Case]) -> None:
    """A number of a sum is rounded by 6e-8 a few times in a step; the rest is as in test_gradient_reduction.py."""
    ranks = run_ranks(_trained, cases[0].world_size, cases)
    for index, case in enumerate(cases):
        for rank, seen in enumerate(each[index] for each in ranks):
            where = f"{case} rank {rank}: {seen}"
            assert seen["smallest norm"] > 2 * CLIPPING, f"the clip does not bite, {where}"
            assert seen["lost"] < 2e-6, where
            assert seen["norm"] < 1e-6, where
            of_a_step = case.learning_rate * (CLIPPING if case.optimizer == "sgd" else 1.0)
            assert seen["weights"] < of_a_step * 2e-5 + 3e-7, where
            # half a scale of what changed and was left behind before; nothing where weights are sent whole
            assert seen["weights behind"] <= (0.51 / 127 if "weights" in case.compression else 0.0), where
            assert not seen["disagreements"], where


CHAIN = [
    Case(pp=2, dp=2, dtype="bf16", **SMALL, compression=TOP_K | WEIGHTS),
    Case(tp=2, dp=2, sequence_parallel=True, sequence=34, **SMALL, compression=INT8),
    Case(dp=4, **SMALL, compression=INT4),
]


def _handed_on(rank: int, root: Path) -> None:
    """Each layout saves what it has loaded of the one before, trains, and saves again."""
    former = None
    for place, case in enumerate(CHAIN):
        engine = engine_of(case)
        if former is not None:
            load_engine(engine, CheckpointReader(former), weights_only=False)
            save(engine, root / f"{place} loaded", 1)
        for batch in global_batches(case)[:2]:
            engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate)
        assert save(engine, root / str(place), 2).failure is None
        former = root / str(place) / step_folder(2)
        engine.deepspeed.destroy()


@pytest.mark.slow
def test_what_is_owed_is_handed_on_to_another_layout(tmp_path: Path) -> None:
    """Owed by all replicas together, and by the parts of norms' gradients under sequence parallelism."""
    run_ranks(_handed_on, 4, tmp_path)
    for place in range(len(CHAIN) - 1):
        saved = CheckpointReader(tmp_path / str(place) / step_folder(2))
        loaded = CheckpointReader(tmp_path / f"{place + 1} loaded" / step_folder(1))
        for name in saved.shapes:
            there, here = (reader.read(name, kind=UNTOLD) for reader in (saved, loaded))
            assert there.abs().max() > 0 or place, f"{name}: nothing is owed"
            torch.testing.assert_close(here, there, rtol=1e-6, atol=0.0)  # a product and a sum, each rounded
