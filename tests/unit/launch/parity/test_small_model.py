"""A small model has every switch of the large one, and every option still does something in it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import transformers

from launch.parity.layout import ParityLayout
from launch.parity.problem import make_problem
from megalite.config import Config, ModelConfig
from models.families import FAMILIES, hf_config, model_config
from models.rope import rope_of_layer
from tests.helpers.odd_sizes import config_of

LAYOUTS = [ParityLayout(), ParityLayout(tp=2), ParityLayout(tp=4, sequence_parallel=True), ParityLayout(pp=2)]


def made(model: ModelConfig) -> Config:
    config = config_of(sequence=min(4096, model.max_position_embeddings), model=model.model_dump(mode="json"))
    return make_problem(config, LAYOUTS, seed=1, steps=3, full=False).config


def published(model_type: str, **keys: Any) -> ModelConfig:
    """transformers' default of a family, with some of its keys as a published config.json has them."""
    values = transformers.AutoConfig.for_model(model_type, **copy.deepcopy(keys)).to_dict()  # it writes into them
    return ModelConfig.model_validate(model_config(values))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_default_model_of_every_family_gets_small_and_stays_of_its_family(model_type: str) -> None:
    large = published(model_type, **({"num_experts_per_tok": 6} if model_type == "deepseek_v2" else {}))
    config = made(large)
    small = config.model
    hf_config(small, "fp32")  # raises where transformers has no such model
    for layout in LAYOUTS:
        layout.config(config)
    assert small.hidden_size <= 256 and small.num_hidden_layers <= 5
    switches = {name for name, value in large if isinstance(value, bool | str)}
    assert small.model_dump(include=switches) == large.model_dump(include=switches)
    assert (small.num_experts is None) == (large.num_experts is None)
    for model in (small, large):
        assert len(model.layer_types) == model.num_hidden_layers
    assert _kinds(small) == _kinds(large)


def _kinds(model: ModelConfig) -> set[tuple[bool, bool, bool]]:
    return {
        (model.has_window(layer), model.has_experts(layer), model.rotary_dim(layer) > 0)
        for layer in range(model.num_hidden_layers)
    }


def test_a_layer_of_every_kind_is_kept_in_its_order() -> None:
    large = published("gemma3_text", num_hidden_layers=34)  # five sliding layers, then a full one
    assert made(large).model.layer_types == ("sliding_attention",) * 4 + ("full_attention",)
    dense_later = published("qwen3_moe", num_hidden_layers=20, mlp_only_layers=[2, 9])
    assert made(dense_later).model.mlp_only_layers == (2,)
    without_rope_late = ModelConfig.model_validate(dense_later.model_dump() | {"layers_without_rope": (8, 19)})
    small = made(without_rope_late).model
    assert (small.num_hidden_layers, small.layers_without_rope, small.mlp_only_layers) == (5, (4,), (2,))


def test_windows_caps_and_learned_positions_are_in_reach_of_short_sequences() -> None:
    gemma = made(published("gemma2"))
    assert gemma.model.sliding_window == 12 and gemma.training.sequence_length == 96
    assert gemma.model.attn_logit_softcapping == gemma.model.final_logit_softcapping == 5.0
    assert gemma.model.query_pre_attn_scalar == gemma.model.head_dim, "the scale of scores is that of the head again"
    assert made(published("gpt2")).model.max_position_embeddings == 192


PHI3 = {"hidden_size": 3072, "num_attention_heads": 32, "max_position_embeddings": 131072}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * pair for pair in range(48)],
    "long_factor": [1.0 + pair for pair in range(48)],
    "original_max_position_embeddings": 4096,
}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    "large",
    [
        published("phi3", **PHI3, rope_scaling=LONG, original_max_position_embeddings=4096),
        # Phi-4-mini: heads of 128 features, of which 96 are rotated
        published(
            "phi3",
            **(PHI3 | {"num_attention_heads": 24, "num_key_value_heads": 8}),
            rope_scaling=LONG,
            original_max_position_embeddings=4096,
            partial_rotary_factor=0.75,
        ),
        published("llama", max_position_embeddings=131072, rope_scaling=LLAMA3),
    ],
    ids=["Phi-3-mini-128k", "Phi-4-mini", "Llama-3.1"],
)
def test_sequences_are_longer_than_the_first_training_s(large: ModelConfig) -> None:
    config = made(large)
    small, longest = config.model, config.training.sequence_length
    hf_config(small, "fp32")
    before, after = rope_of_layer(large, 0), rope_of_layer(small, 0)
    assert before is not None and after is not None and small.rope_scaling is not None
    assert after.original_length == longest // 2
    assert after.factor == before.factor, "as much longer as the large model's"
    if small.rope_scaling.long_factor is not None:
        assert len(small.rope_scaling.long_factor) == len(small.rope_scaling.short_factor or ()) == after.dim // 2
        assert set(small.rope_scaling.long_factor) <= set(LONG["long_factor"])


@pytest.mark.parametrize(
    ("experts", "chosen", "small_experts", "small_chosen"),
    [(128, 8, 4, 2), (8, 2, 4, 2), (64, 1, 4, 1), (16, 12, 4, 3), (3, 3, 3, 3)],
)
def test_experts_get_fewer_and_some_stay_idle(experts: int, chosen: int, small_experts: int, small_chosen: int) -> None:
    small = made(published("qwen3_moe", num_experts=experts, num_experts_per_tok=chosen)).model
    assert (small.num_experts, small.num_experts_per_tok) == (small_experts, small_chosen)
    assert small.hidden_size == 128 and small.moe_intermediate_size == 48
