"""Options of one model that contradict each other are one sentence, and what it advises works."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megalite.config import ConfigError, ModelConfig, load_config
from megalite.config.rules.model import problem_with_model
from megalite.config.rules.rules import check_rules
from tests.helpers.sizes import ODD_SIZES

EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 29}
LATENT = {"kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 8}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6}

# options -> fragments of the sentence in this order, and what to change as it says
BROKEN: list[tuple[dict[str, Any], list[str], dict[str, Any]]] = [
    ({"hidden_size": 50}, ["hidden_size 50", "num_attention_heads 4", "of 48 or 56"], {"hidden_size": 56}),
    ({"head_dim": 7}, ["head_dim 7 is odd", "pairs", "6 or 8"], {"head_dim": 8}),
    ({"partial_rotary_factor": 0.05}, ["0.05", "head_dim 12", "at least 0.1667"], {"partial_rotary_factor": 0.1667}),
    ({"num_key_value_heads": 3}, ["num_attention_heads 4", "heads 3", "2 or 4 kv"], {"num_key_value_heads": 2}),
    ({"layer_types": ["full_attention"]}, ["names 1", "is 3", "null"], {"layer_types": None}),
    ({"layer_types": SLIDING}, ["sliding_attention (layer 0)", "is null"], {"sliding_window": 8}),
    (
        {"layers_without_rope": [0, 3]},
        ["layers_without_rope", "layer 3", "3 layers", "to 2"],
        {"layers_without_rope": [2]},
    ),
    (EXPERTS | {"mlp_only_layers": [4]}, ["mlp_only_layers", "layer 4", "to 2"], {"mlp_only_layers": [0, 2]}),
    (EXPERTS | {"num_experts_per_tok": 4}, ["num_experts_per_tok 4", "experts 3"], {"num_experts_per_tok": 3}),
    ({"num_experts_per_tok": 4}, ["num_experts_per_tok", "num_experts is null"], {"num_experts": 8}),
    ({"norm_topk_prob": False}, ["norm_topk_prob", "num_experts is null"], {"norm_topk_prob": True}),
    ({"mlp_only_layers": [0]}, ["mlp_only_layers", "num_experts is null"], {"mlp_only_layers": []}),
    (EXPERTS | {"n_group": 2}, ["num_experts 3", "n_group 2", "1 or 3 groups"], {"n_group": 1}),
    (EXPERTS | {"topk_group": 2}, ["topk_group 2", "n_group 1", "at most 1"], {"topk_group": 1}),
    (EXPERTS | {"n_group": 3}, ["tok 2", "the 1 experts", "topk_group of 2"], {"topk_group": 2}),
    (
        EXPERTS | {"n_group": 3, "topk_group": 2, "group_score": "top2_sum"},
        ["group_score top2_sum", "two experts", "n_group 3", "max"],
        {"group_score": "max"},
    ),
    (LATENT | {"v_head_dim": 20}, ["v_head_dim 20", "head_dim 16"], {"v_head_dim": 16}),
    (LATENT | {"head_dim": 12}, ["head_dim 12", "the 16 of", "leave head_dim out"], {"head_dim": None}),
    (LATENT | {"num_key_value_heads": 2}, ["kv_lora_rank 14", "heads 4", "heads 2"], {"num_key_value_heads": None}),
    (LATENT | {"qk_rope_head_dim": 5}, ["qk_rope_head_dim 5 is odd", "4 or 6"], {"qk_rope_head_dim": 4}),
    (LATENT | {"query_key_norm": "per_head"}, ["query_key_norm per_head", "14"], {"query_key_norm": "none"}),
    (LATENT | {"qk_nope_head_dim": None}, ["needs model.qk_nope_head_dim"], {"qk_nope_head_dim": 8}),
    ({"q_lora_rank": 8}, ["q_lora_rank", "kv_lora_rank is null"], {"q_lora_rank": None}),
    ({"n_shared_experts": 1}, ["n_shared_experts", "num_experts is null"], {"n_shared_experts": 0}),
    (EXPERTS | {"gated_mlp": False}, ["gated_mlp false", "num_experts 3"], {"gated_mlp": True}),
    (EXPERTS | {"mlp_bias": True}, ["mlp_bias true", "num_experts 3"], {"num_experts": None}),
    (
        {"norm_placement": "post", "use_parallel_residual": True},
        ["norm_placement post", "use_parallel_residual", "pre"],
        {"norm_placement": "pre"},
    ),
    (
        {"query_key_norm": "full_width", "normalization": "layernorm"},
        ["query_key_norm full_width", "normalization layernorm", "rmsnorm"],
        {"normalization": "rmsnorm"},
    ),
    (
        {"position_embedding": "learned", "rope_scaling": {"rope_type": "linear", "factor": 2}},
        ["rope_scaling", "position_embedding is learned"],
        {"position_embedding": "rope"},
    ),
    (
        {"position_embedding": "learned", "partial_rotary_factor": 0.5},
        ["partial_rotary_factor", "learned"],
        {"partial_rotary_factor": 1},
    ),
    (
        {"position_embedding": "learned", "layers_without_rope": [1]},
        ["layers_without_rope", "learned"],
        {"layers_without_rope": []},
    ),
    ({"rope_scaling": {"rope_type": "linear"}}, ["linear needs factor", "rope_scaling.factor"], {"rope_scaling": None}),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2, "beta_fast": 32}},
        ["beta_fast has no meaning", "dynamic, which has factor:"],
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2}},
    ),
    (
        {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1}},
        ["llama3 needs factor, low_freq_factor, high_freq_factor", "rope_scaling.high_freq_factor"],
        {"rope_scaling": LLAMA3},
    ),
    (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2}, "partial_rotary_factor": 0.2},
        ["dynamic", "more than 2 rotated features"],
        {"partial_rotary_factor": 1.0},
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4}, "rope_theta": 1},
        ["rope_theta 1", "yarn"],
        {"rope_theta": 1e4},
    ),
    (
        {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 1}},
        ["original_max_position_embeddings 1", "above 1"],
        {"rope_scaling": LONGROPE},
    ),
    (
        {"rope_scaling": LLAMA3 | {"low_freq_factor": 4}},
        ["high_freq_factor 4", "larger than low_freq_factor 4"],
        {"rope_scaling": LLAMA3},
    ),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "short_factor": [1.0]}},
        ["short_factor has no meaning", "yarn"],
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "truncate": False, "mscale": 1.0}},
    ),
    (
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 6}},
        ["longrope needs short_factor, long_factor", "rope_scaling.long_factor"],
        {"rope_scaling": LONGROPE},
    ),
    (
        {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5},
        ["short_factor has 6 numbers", "3 pairs"],
        {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}},
    ),
]


@pytest.mark.parametrize(("options", "fragments", "remedy"), BROKEN, ids=[str(row[0])[:60] for row in BROKEN])
def test_a_contradiction_is_one_sentence_with_a_remedy_that_works(
    options: dict[str, Any], fragments: list[str], remedy: dict[str, Any]
) -> None:
    sentence = problem_with_model(ModelConfig.model_validate(ODD_SIZES | options))
    assert sentence is not None and sentence.startswith("model.") and "\n" not in sentence
    position = 0
    for fragment in fragments:
        assert fragment in sentence[position:], f"{fragment!r} is not in (the rest of) {sentence!r}"
        position = sentence.index(fragment, position) + len(fragment)
    assert problem_with_model(ModelConfig.model_validate(ODD_SIZES | options | remedy)) is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"position_embedding": "learned", "head_dim": 7},
        {"head_dim": 10, "partial_rotary_factor": 0.3},  # three features: transformers rounds up, and so do we
        {"head_dim": 7, "partial_rotary_factor": 0.5},
        {"hidden_act": "relu", "gated_mlp": True},
        {"sliding_window": 4096, "layer_types": ["full_attention"] * 3},  # as Qwen2 writes it
        {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 1024}},
        EXPERTS | {"num_experts": 2},
    ],
    ids=str,
)
def test_what_transformers_computes_is_no_contradiction(options: dict[str, Any]) -> None:
    model = ModelConfig.model_validate(ODD_SIZES | options)
    assert problem_with_model(model) is None
    assert problem_with_model(ModelConfig.model_validate(model.model_dump())) is None  # every option said


def test_a_config_file_is_checked(minimal: Path) -> None:
    with pytest.raises(ConfigError, match=r"num_experts_per_tok 9 is more than model\.num_experts 8"):
        load_config(minimal, ["model.num_experts=8", "model.num_experts_per_tok=9"])
    assert load_config(minimal, ["model.num_experts=8"]).model.num_experts == 8


def test_balance_losses_are_for_models_with_experts(tmp_path: Path) -> None:
    """Silently without effect, they would seem to be on."""
    path = tmp_path / "run.yaml"
    values: dict[str, Any] = {
        "run_dir": "unused",
        "model": ODD_SIZES,
        "data": {"path": "unused"},
        "optimizer": {"learning_rate": 0.001},
        "training": {"global_batch_size": 4, "micro_batch_size": 2, "sequence_length": 33, "steps": 1},
    }
    values["training"]["router"] = {"z_loss": 0.1}
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"router\.z_loss 0\.1 is about experts, but model\.num_experts is null"):
        check_rules(load_config(path, []), 1, "cpu")
    values["model"] = ODD_SIZES | EXPERTS
    path.write_text(json.dumps(values))
    check_rules(load_config(path, []), 1, "cpu")
    values["training"]["router"], values["checkpoint"] = {"bias_rate": 0.01}, {"export_hf": "last"}
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=r"export_hf last cannot write the bias of training\.router\.bias_rate 0\.01"):
        check_rules(load_config(path, []), 1, "cpu")
