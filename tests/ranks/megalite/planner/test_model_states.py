"""Predicted bytes of weights, moments and fp32 copies against those that real ranks hold after a step."""

from __future__ import annotations

import pytest
import torch

from megalite.config import resolve_layout
from megalite.engine.deepspeed.internals import resident_weights
from megalite.engine.deepspeed.step import flat_partitions
from megalite.parallel.mesh import Mesh
from megalite.planner.cost.model_states import state_bytes
from megalite.planner.cost.stage_parameters import stages_of
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks

CASES = [
    Case(dp=3),
    Case(dp=2, dtype="bf16"),
    Case(dp=2, zero=2, optimizer="sgd", dtype="bf16"),
    Case(dp=2, zero=3, dtype="bf16"),
    Case(tp=2, pp=2),
    Case(tp=2, dp=2, optimizer="muon", optimizer_options={"moments_dtype": "bf16"}),
]


def _held(rank: int, case: Case) -> int:
    engine = engine_of(case)
    engine.train_step(micro_batches_of(engine, case, global_batches(case)[0]), 1e-3)
    weights = [resident_weights(parameter) for _, parameter in engine.parameters()]
    copies = flat_partitions(engine.deepspeed.optimizer) if case.dtype != "fp32" else []  # in fp32 weights are updated
    states = [value for state in engine.torch_optimizer.state.values() for value in state.values()]
    tensors = [*weights, *copies, *(value for value in states if isinstance(value, torch.Tensor) and value.ndim)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_are_those_of_real_ranks(case: Case) -> None:
    """ZeRO pads what it cuts to its alignment: less than 1 % of this model."""
    config, mesh = case.config(), Mesh(case.tp, case.pp, case.dp)
    layout = resolve_layout(config, case.world_size, "cpu")
    stages = stages_of(config, layout)
    for rank, held in enumerate(run_ranks(_held, case.world_size, case)):
        predicted = state_bytes(config, layout, stages[mesh.coordinate(rank).pipeline_rank])
        assert abs(held - predicted) < 0.01 * held, f"rank {rank}: {held} bytes held, {predicted} predicted"


def test_what_is_offloaded_is_on_no_device() -> None:
    whole, offloaded = Case(dp=2), Case(dp=2, offload={"optimizer": "cpu"})
    layout = resolve_layout(whole.config(), 2, "cuda")
    (stage,) = stages_of(whole.config(), layout)
    assert state_bytes(whole.config(), layout, stage) == 4 * stage.parameters + 8 * stage.parameters // 2
    assert state_bytes(offloaded.config(), layout, stage) == 4 * stage.parameters
