"""What the planner counts of adapters is what the layers hold, and what a run with them needs follows from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.config import ModelConfig
from megalite.config.sections import AdapterConfig
from megalite.parallel.adapters import with_adapters
from megalite.parallel.collectives import TensorParallel
from megalite.planner.cost.communication_volumes import data_moved
from megalite.planner.cost.memory import memory_of
from megalite.planner.cost.model_states import adapter_numbers
from megalite.planner.cost.stage_parameters import stage_shapes
from megalite.planner.workload import ParallelLayout, TrainingWorkload
from models.decoder import decoder_layers
from tests.helpers.odd_sizes import MODEL

SIZES = ModelConfig.model_validate(MODEL)
EXPERTS = MODEL | {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 21}
PLAIN = ModelConfig.model_validate(MODEL | {"gated_mlp": False, "hidden_act": "relu"})
LATENT = EXPERTS | {
    **{"num_key_value_heads": 4, "head_dim": None, "kv_lora_rank": 14, "q_lora_rank": 18, "qk_nope_head_dim": 10},
    **{"qk_rope_head_dim": 6, "v_head_dim": 7},
}
LORA = AdapterConfig(name="lora", rank=3)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        (SIZES, LORA),
        (PLAIN, LORA),
        (SIZES, AdapterConfig(name="lora", rank=5, targets=("v_proj", "down_proj"))),
        (ModelConfig.model_validate(EXPERTS), AdapterConfig(name="lora", rank=2, targets=("q_proj", "o_proj"))),
        (
            ModelConfig.model_validate(LATENT),
            AdapterConfig(name="lora", rank=2, targets=("q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        ),
        (SIZES, AdapterConfig()),
    ],
)
def test_numbers_are_those_of_the_layers(model: ModelConfig, adapter: AdapterConfig, tp: int) -> None:
    layers = [spec.build(TensorParallel(tp, 0)) for spec in with_adapters(decoder_layers(model), adapter)]
    trained = sum(p.numel() for layer in layers for p in layer.parameters() if p.requires_grad)
    expected = trained if adapter.name == "lora" else 0
    assert adapter_numbers(model, adapter, stage_shapes(model, tp, 1)[0], tp) == expected


@pytest.mark.parametrize("zero_stage", [1, 2])
def test_a_run_with_adapters_needs_weights_once_and_state_of_the_factors(zero_stage: int) -> None:
    """In bf16 a model's fp32 copy, moments and gradients take 16 bytes a number beside its 2."""
    layout = ParallelLayout(data_parallel_size=2, zero_stage=zero_stage)  # type: ignore[arg-type]
    whole = TrainingWorkload(SIZES, layout, sequence_length=32, global_batch_size=2)
    job, shape = replace(whole, adapter=LORA), stage_shapes(SIZES, 1, 1)[0]
    trained = adapter_numbers(SIZES, LORA, shape, 1)
    ours, theirs = (memory_of(each)[0] for each in (job, whole))
    assert ours.parts["weights"] == 2 * (shape.parameters + trained)
    assert ours.parts["optimizer"] == 12 * trained / 2 and ours.total < theirs.total
    moved = data_moved(job, shape)
    assert moved.all_gather == 2 * trained and moved.reduce_scatter + moved.all_reduce == 4 * trained
