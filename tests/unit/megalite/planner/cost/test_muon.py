"""Muon's numbers by arithmetic, against the layers that ranks build, and their place in memory and time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.config.suggestions import tensor_parallel_fits
from megalite.parallel.collectives import TensorParallel
from megalite.planner.cost.memory import CUDA, memory_of
from megalite.planner.cost.muon import orthogonalized_numbers, orthogonalizing_flops
from megalite.planner.cost.stage_parameters import stage_shapes, stages_of_job
from megalite.planner.workload import ParallelLayout, TrainingWorkload
from models.decoder import decoder_layers
from tests.helpers.hub_models import HUB_MODELS, HubModel
from tests.helpers.odd_sizes import config_of
from tests.unit.models.families.test_families import options_of


@pytest.mark.parametrize("hub_model", HUB_MODELS, ids=str)
def test_matrices_of_blocks_are_those_that_layers_hold(hub_model: HubModel) -> None:
    """Cut matrices, that is: routers are whole on every rank, and norms and biases are vectors."""
    model = options_of(hub_model)
    for tp in (1, 2, 3):
        if not tensor_parallel_fits(model, tp):
            continue
        with torch.device("meta"):
            blocks = [spec.build(TensorParallel(tp, 0)) for spec in decoder_layers(model) if spec.is_block]
        parameters = [parameter for block in blocks for parameter in block.parameters()]
        held = sum(p.numel() for p in parameters if p.ndim > 1 and not p.shard.is_replicated)  # type: ignore[attr-defined]
        assert orthogonalized_numbers(model, stage_shapes(model, tp, 1)[0], tp) == held, f"tp={tp}"


def _job(optimizer: str, moments_dtype: str = "fp32") -> TrainingWorkload:
    layout = ParallelLayout(data_parallel_size=2)
    job = TrainingWorkload(config_of().model, layout, sequence_length=33, global_batch_size=4)
    return replace(job, optimizer=optimizer, moments_dtype=moments_dtype)  # type: ignore[arg-type]


def test_optimizer_memory_follows_moments_and_their_format() -> None:
    """An fp32 copy of the weights, and of a matrix in a block one moment in place of two; over two replicas."""
    (shape,) = stages_of_job(_job("muon"))
    matrices, numbers = orthogonalized_numbers(_job("muon").model, shape, 1), shape.parameters
    expected = {
        ("adamw", "fp32"): 12 * numbers,
        ("adamw", "bf16"): 8 * numbers,
        ("muon", "fp32"): 12 * numbers - 4 * matrices,
        ("muon", "bf16"): 8 * numbers - 2 * matrices,
    }
    for (optimizer, moments_dtype), size in expected.items():
        (stage,) = memory_of(_job(optimizer, moments_dtype), CUDA)
        assert stage.parts["optimizer"] == size / 2, (optimizer, moments_dtype)


def test_flops_of_one_square_block() -> None:
    """Five iterations of three products of n x n, 2 n^3 each, of 4 + 3 matrices; replicas share them."""
    model = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    job = replace(_job("muon"), model=config_of(model=model | {"num_key_value_heads": 2}).model)
    assert orthogonalizing_flops(job, stages_of_job(job)[0]) == 7 * 5 * 3 * 2 * 8**3 / 2
    assert orthogonalizing_flops(replace(job, optimizer="adamw"), stages_of_job(job)[0]) == 0
