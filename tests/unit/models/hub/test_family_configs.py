"""config.json to our options and back: nothing is lost, guessed or read as something else than transformers reads."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megalite.config import ModelConfig
from models.families import FAMILIES, family, hf_config, model_config
from models.hub.config_parts import FamilyError
from tests.helpers.hub_configs import HUB_CONFIGS
from tests.helpers.hub_models import HUB_MODELS, LINEAR, HubModel, longrope
from tests.helpers.sizes import ODD_SIZES

LENGTH = {"original_max_position_embeddings": 16}
SLIDING = "sliding_attention"
NEOX = {"normalization": "layernorm", "gated_mlp": False, "attention_bias": True, "mlp_bias": True}
GEMMA3 = {
    **{"normalization": "zero_centered_rmsnorm", "norm_placement": "pre_and_post", "query_key_norm": "per_head"},
    **{"scale_embeddings": True, "sliding_window": 7},
}
OLMO = {"norm_placement": "post", "query_key_norm": "full_width", "sliding_window": 7}
SIGMOID_EXPERTS = {
    "num_experts": 3,
    "scoring_func": "sigmoid",
    "group_score": "top2_sum",
    "e_score_correction_bias": True,
    "fp32_router": True,
}


V4_SPELLINGS = {
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq", "rotary_pct", "rotary_emb_base"),
    "num_experts",
}


@pytest.mark.parametrize("hub_model", HUB_MODELS, ids=str)
def test_config_goes_to_ours_and_back_unchanged(hub_model: HubModel) -> None:
    original = hub_model.config().to_diff_dict()
    model = ModelConfig.model_validate(model_config(original))
    written = hf_config(model, "fp32", family(model.model_type).carried(original))
    assert ModelConfig.model_validate(model_config(written)) == model
    again = transformers.AutoConfig.for_model(**deepcopy(written)).to_dict()
    unchanged = transformers.AutoConfig.for_model(**deepcopy(original)).to_dict()
    again = {key: value for key, value in again.items() if key in unchanged or key not in V4_SPELLINGS}
    again.get("rope_parameters", {}).pop("type", None)
    for spoken_anew in ("dtype", "architectures"):
        again.pop(spoken_anew), unchanged.pop(spoken_anew)
    assert again == unchanged


def test_a_written_config_has_the_keys_of_transformers_4_and_5() -> None:
    """transformers 4.57 reads a v5-only config.json as rope_theta 10000, without a word."""
    written = hf_config(ModelConfig(**ODD_SIZES, rope_theta=5e5), "bf16")
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e5
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert written["eos_token_id"] is None  # or transformers would stop at its own vocabulary's


@pytest.mark.parametrize("hub_model", HUB_MODELS, ids=str)
def test_transformers_4_and_5_spell_the_same_model(hub_model: HubModel) -> None:
    """Each half of what we write is enough: without `rope_parameters`, and with nothing but them."""
    config = hub_model.config().to_diff_dict()
    model = ModelConfig.model_validate(model_config(config))
    written = hf_config(model, "fp32", family(model.model_type).carried(config))
    old = {key: value for key, value in written.items() if key not in ("rope_parameters", "dtype")}
    new = {key: value for key, value in written.items() if key not in V4_SPELLINGS or key == "num_experts"}
    assert model_config(old) == model_config(new) == model_config(written)
    assert old != new


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_missing_key_means_what_it_means_to_transformers(model_type: str) -> None:
    known = FAMILIES[model_type]
    theirs = transformers.AutoConfig.for_model(model_type)
    for key, value in known.all_defaults.items():
        expected = theirs.head_dim if value is None and key == "head_dim" else getattr(theirs, key)
        assert expected == value or (key == "sliding_window" and expected is None), key
    for key, value in known.must_be.items():
        assert getattr(theirs, key, value) in (value, None), key
    sizes = {known.all_keys[option]: value for option, value in ODD_SIZES.items() if option in known.all_keys}
    if model_type == "deepseek_v2":  # null by default, with which it does not run
        sizes["num_experts_per_tok"] = 6
    said = transformers.AutoConfig.for_model(model_type, **sizes).to_dict()
    if model_type == "phi3":
        said["rope_parameters"].pop("original_max_position_embeddings", None)
    assert ModelConfig(**model_config({**sizes, "model_type": model_type})) == ModelConfig(**model_config(said))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_speaks_about_every_option_of_the_model(model_type: str) -> None:
    """A new switch of the decoder must not be lost on its way through a config.json; dropout belongs to a training."""
    known = FAMILIES[model_type]
    spoken_about = Counter([*known.all_keys, *known.all_fixed, *known.derived, "model_type"])
    spoken_about.update(option for part in known.all_parts for option in part.options)
    assert set(spoken_about) == {name for name in ModelConfig.model_fields if not name.endswith("_dropout")}
    assert set(spoken_about.values()) == {1}


QWEN3_MOE = {
    **{"model_type": "qwen3_moe", "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "num_hidden_layers": 4},
}
LLAMA3 = {**LINEAR, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_layers_without_experts_come_back_as_they_were_spelled() -> None:
    """A step and a list say it in config.json, one list in ours; what ours no longer says is written as a list."""
    original = ODD_SIZES | QWEN3_MOE | {"decoder_sparse_step": 3, "mlp_only_layers": [2]}
    model = ModelConfig(**model_config(original))
    assert model.mlp_only_layers == (0, 1, 2, 3)
    carried = family("qwen3_moe").carried(original)
    assert hf_config(model, "fp32", carried)["decoder_sparse_step"] == 3
    assert hf_config(model, "fp32", carried)["mlp_only_layers"] == [2]
    changed = hf_config(model.model_copy(update={"mlp_only_layers": (1,)}), "fp32", carried)
    assert (changed["decoder_sparse_step"], changed["mlp_only_layers"]) == (1, [1])


def test_mistral_with_layer_types_is_ministral_as_transformers_reads_it(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "full_attention"]
    written = ODD_SIZES | {
        "model_type": "mistral",
        "num_key_value_heads": 2,
        "layer_types": types,
        "architectures": ["MistralForCausalLM"],
    }
    model = ModelConfig(**model_config(written | {"sliding_window": 7}))
    (tmp_path / "config.json").write_text(json.dumps(written))
    assert model.model_type == transformers.AutoConfig.from_pretrained(tmp_path).model_type == "ministral"
    assert list(model.layer_types) == types
    assert hf_config(model, "fp32")["architectures"] == ["MinistralForCausalLM"]


@pytest.mark.parametrize("config", HUB_CONFIGS, ids=[config["_name_or_path"] for config in HUB_CONFIGS])
def test_config_files_of_the_hub_read_as_transformers_reads_them(config: dict[str, Any]) -> None:
    """Their old spellings and harmless keys must not be refused."""
    model = ModelConfig.model_validate(model_config(config))
    theirs = transformers.AutoConfig.for_model(**deepcopy(config)).to_diff_dict()
    modern = {key: value for key, value in theirs.items() if key not in V4_SPELLINGS}
    assert ModelConfig.model_validate(model_config(modern)) == model


SAME_TWICE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rope_scaling": {"type": "linear", "factor": 2.5}}, {"rope_parameters": LINEAR}),
    ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "rope_theta": 1e4}}, {"rope_scaling": LINEAR}),
    ({"rope_scaling": {"rope_type": "default"}}, {}),
    ({"rope_scaling": {}, "partial_rotary_factor": 1.0}, {}),
    ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 16}, {"rope_scaling": {**LLAMA3, **LENGTH}}),
    ({"rope_scaling": {**LINEAR, "factor": None}}, {"rope_scaling": {"rope_type": "linear"}}),
    (
        {"model_type": "phi3", **LENGTH, "rope_scaling": {**longrope(6), "type": "su", "rope_type": None}},
        {"model_type": "phi3", **LENGTH, "rope_scaling": longrope(6)},
    ),
    ({"model_type": "gpt_neox", "rotary_pct": 0.5, "rope_theta": 1e4}, {"model_type": "gpt_neox", "rotary_pct": 0.5}),
]


@pytest.mark.parametrize(("one", "other"), SAME_TWICE, ids=[str(one)[:60] for one, _ in SAME_TWICE])
def test_spellings_of_one_model(one: dict[str, Any], other: dict[str, Any]) -> None:
    plain = {**ODD_SIZES, "model_type": "llama"}
    assert model_config(plain | one) == model_config(plain | other)


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gptj"}, "gptj"),
    ({"model_type": None}, "None"),
    ({"model_type": ["llama"]}, "llama"),
    ({"rope_scaling": {"rope_type": "proportional", "factor": 32.0}}, "proportional"),
    ({"rope_scaling": {**LINEAR, "mrope_section": [2, 2, 2]}}, "mrope_section"),
    ({"rope_scaling": {**LINEAR, "beta_fast": 32}}, "beta_fast"),
    ({"rope_scaling": {"rope_type": "linear", "type": "dynamic", "factor": 2.0}}, "rope_scaling.type dynamic"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 3.0}}, "rope_scaling"),
    ({"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta 10000.0 and rope_parameters.rope_theta"),
    (
        {"rope_scaling": {**LLAMA3, **LENGTH}, "original_max_position_embeddings": 32},
        "original_max_position_embeddings 32",
    ),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"sliding_window": 4096}, "sliding_window"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"model_type": "starcoder2", "mlp_bias": True}, "mlp_bias"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3}, "sliding_window"),
    ({"model_type": "qwen2", "layer_types": ["full_attention"] * 2}, "2 layer_types for 3"),
    ({"model_type": "ministral", "sliding_window": None}, "no sliding_window"),
    ({"model_type": "qwen3_moe", "num_experts": 3, "num_local_experts": 4}, "num_local_experts 4"),
    ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({"model_type": "gemma3_text", "sliding_window_pattern": None}, "sliding_window_pattern None"),
    ({"model_type": "qwen3_moe", "shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size 512"),
    ({"model_type": "gemma3_text", "rope_parameters": {"rope_theta": 1e6}}, "rope_theta in rope_parameters"),
    ({"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": LINEAR}}, "plain RoPE"),
    (
        {"model_type": "gemma3_text", "rope_local_base_freq": 5.0, "rope_parameters": {SLIDING: {"rope_theta": 6.0}}},
        "rope_local_base_freq 5.0",
    ),
    ({"model_type": "gpt_neox", "rope_theta": 5e5}, "rotary_emb_base 10000.0 and rope_theta 500000.0"),
    ({"model_type": "gpt_neox", "head_dim": 16}, "head_dim"),
    ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "2 no_rope_layers for 3"),
    ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise"),
    ({"model_type": "deepseek_v2", "num_experts_per_tok": 6, "topk_method": "noaux_tc"}, "topk_method 'noaux_tc'"),
    ({"model_type": "deepseek_v3", "rope_interleave": False}, "rope_interleave False"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED_CONFIGS, ids=[str(change)[:50] for change, _ in REFUSED_CONFIGS])
def test_a_config_we_cannot_compute_exactly_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    plain = {**ODD_SIZES, "model_type": "llama"}
    with pytest.raises(FamilyError) as caught:
        model_config(plain | change)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_size_that_is_missing_is_named() -> None:
    with pytest.raises(FamilyError, match="vocab_size"):
        model_config({key: value for key, value in ODD_SIZES.items() if key != "vocab_size"} | {"model_type": "llama"})


JUNK = [None, True, -1, 0, 3, 0.5, 1e400, "three", [], ["three"], [None], [2, -7], {}, {"factor": []}, {"type": [1]}]


@pytest.mark.parametrize(
    "hub_model", [next(m for m in HUB_MODELS if m.model_type == known) for known in FAMILIES], ids=str
)
@given(data=st.data())
def test_junk_under_any_key_is_one_sentence(hub_model: HubModel, data: st.DataObject) -> None:
    """A folder from anywhere: what it says is read, or refused in words, and nothing else happens."""
    config = hf_config(ModelConfig(**model_config(hub_model.config().to_diff_dict())), "fp32")
    key = data.draw(st.sampled_from(sorted(config)))
    try:
        model = ModelConfig.model_validate(model_config(config | {key: data.draw(st.sampled_from(JUNK))}))
        family(model.model_type).check(model)
    except (FamilyError, ValidationError) as error:
        assert str(error)


MIXED = ("full_attention", "sliding_attention", "full_attention")
YARN_OPTIONS = {"rope_type": "yarn", "factor": 4.0}
INEXPRESSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"gated_mlp": False}, "gated_mlp false is no llama"),
    ({"normalization": "layernorm"}, "normalization layernorm"),
    ({"query_key_norm": "per_head"}, "query_key_norm per_head is no llama"),
    ({"num_experts": 4}, "num_experts 4 is no llama"),
    ({"sliding_window": 7}, "sliding_window 7 is no llama"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is no llama"),
    ({"rope_local_base_freq": 100.0}, "rope_local_base_freq 100.0 is no llama"),
    ({"layers_without_rope": (1,)}, "layers_without_rope [1] is no llama"),
    ({"attention_output_bias": True}, "attention_bias false and model.attention_output_bias true"),
    ({"model_type": "mistral", "sliding_window": 7, "layer_types": MIXED}, "layer_types are not all"),
    ({"model_type": "mixtral"}, "num_experts null is no mixtral"),
    ({"model_type": "ministral"}, "sliding_window null is no ministral"),
    ({"model_type": "phi3", "rope_scaling": YARN_OPTIONS}, "yarn is no phi3"),
    ({"model_type": "gpt_neox", "num_key_value_heads": 2, **NEOX}, "num_key_value_heads 2 is no gpt_neox"),
    ({"model_type": "gpt_neox", "head_dim": 20, **NEOX}, "head_dim 20 is no gpt_neox"),
    (
        {"model_type": "gpt_neox", "rope_scaling": YARN_OPTIONS, "partial_rotary_factor": 0.25, **NEOX},
        "rotates 3 features",
    ),
    ({"model_type": "gpt2", **NEOX}, "position_embedding rope is no gpt2"),
    ({"model_type": "gemma3_text", "rope_scaling": YARN_OPTIONS, **GEMMA3}, "rope_local_base_freq null"),
    ({"model_type": "gemma3_text", "query_pre_attn_scalar": 2.5, **GEMMA3}, "query_pre_attn_scalar 2.5"),
    ({"model_type": "olmo3", "rope_local_base_freq": 5.0, **OLMO}, "rope_local_base_freq is"),
    ({"model_type": "starcoder2"}, "normalization rmsnorm is no starcoder2"),
    ({"model_type": "starcoder2", "normalization": "layernorm", "gated_mlp": False, "mlp_bias": True}, "use_bias"),
    ({"model_type": "glm4_moe", "query_key_norm": "full_width", **SIGMOID_EXPERTS}, "which has per_head or none"),
    ({"model_type": "mamba"}, "mamba"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ({"head_dim": 7}, "head_dim 7"),
]


@pytest.mark.parametrize(("change", "named"), INEXPRESSIBLE, ids=[named for _, named in INEXPRESSIBLE])
def test_a_model_its_family_cannot_express_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(FamilyError) as caught:
        hf_config(ModelConfig(**(ODD_SIZES | change)), "fp32")
    assert named in str(caught.value) and "\n" not in str(caught.value)
