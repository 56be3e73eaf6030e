"""A family says in data what transformers computes: config both ways, names of weights, logits and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from launch.convert import global_shapes, serial_model
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import named_shards
from megalite.parallel.loss import head_logits, head_loss
from models.families import FAMILIES, FamilyError, family, hf_config, model_config
from tests.models.hub_models import HUB_MODELS, HubModel

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("hub_model", HUB_MODELS, ids=str)
def test_decoder_computes_what_transformers_computes_forward_and_backward(hub_model: HubModel) -> None:
    """Catches a wrong switch, epsilon, activation, bias, name or rotary base; the rest is rounding of fused GEMMs."""
    theirs = hub_model.build()
    model = ModelConfig.model_validate(model_config(theirs.config.to_diff_dict()))
    names = family(model.model_type).hub_names(global_shapes(model))
    weights = theirs.state_dict()
    ours = serial_model(model, TensorParallel(), lambda name, source: weights[names[name]][source])

    tokens = torch.randint(model.vocab_size, (3, 33))
    targets = torch.randint(model.vocab_size, (3, 33))
    logits = theirs(tokens).logits
    hidden, head = ours(tokens)
    found = head_logits(hidden, head, model.vocab_size, TensorParallel())
    assert (found - logits).abs().max() <= 1e-5 * logits.std()

    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    head_loss(hidden, head, targets, model.vocab_size, TensorParallel()).backward()
    their_gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    compared = set()
    for _, parameter in named_shards(ours):
        for piece in parameter.shard.pieces():
            expected = their_gradients[names[piece.name]]
            assert parameter.grad[piece.target].sub(expected).norm() <= 1e-5 * expected.norm(), piece.name
            compared.add(names[piece.name])
    assert compared == set(their_gradients)


@pytest.mark.parametrize("hub_model", HUB_MODELS, ids=str)
def test_config_goes_to_ours_and_back_unchanged(hub_model: HubModel) -> None:
    original = hub_model.config().to_diff_dict()
    model = ModelConfig.model_validate(model_config(original))
    written = hf_config(model, "fp32", family(model.model_type).carried(original))
    again = transformers.AutoConfig.for_model(**written).to_dict()
    unchanged = transformers.AutoConfig.for_model(**original).to_dict()
    for spoken_anew in ("dtype", "architectures"):
        again.pop(spoken_anew), unchanged.pop(spoken_anew)
    assert again == unchanged


def test_a_written_config_has_the_keys_of_transformers_4_and_5() -> None:
    """transformers 4.57 reads a v5-only config.json as rope_theta 10000, without a word."""
    written = hf_config(ModelConfig(**SIZES, rope_theta=5e5), "bf16")
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e5
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    assert written["eos_token_id"] is None  # or transformers would stop at its own vocabulary's


def test_a_config_of_transformers_4_reads_as_the_same_model() -> None:
    new = HUB_MODELS[0].config().to_diff_dict()
    old = {key: value for key, value in new.items() if key != "rope_parameters"}
    old |= {"rope_theta": 5e5, "rope_scaling": None, "torch_dtype": "bfloat16", "architectures": ["LlamaForCausalLM"]}
    assert model_config(old) == model_config(new)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_missing_key_means_what_it_means_to_transformers(model_type: str) -> None:
    theirs = transformers.AutoConfig.for_model(model_type)
    for key, value in FAMILIES[model_type].defaults.items():
        assert getattr(theirs, key) == value, key
    assert model_config({**SIZES, "model_type": model_type})["rope_theta"] == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_speaks_about_every_option_of_the_model(model_type: str) -> None:
    """A new switch of the decoder must not be lost on its way through a config.json; dropout belongs to a training."""
    known = FAMILIES[model_type]
    spoken_about = {*known.keys, *known.fixed, "model_type", "rope_theta"}
    assert spoken_about == {name for name in ModelConfig.model_fields if not name.endswith("_dropout")}


REFUSED_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "gpt2"}, "gpt2"),
    ({"model_type": None}, "None"),
    ({"model_type": ["llama"]}, "llama"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}, "rope_scaling"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    ({"rope_scaling": "linear"}, "rope_scaling"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_parameters"),
    ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
    ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "rope_theta 10000.0 and rope_parameters.rope_theta"),
    ({"rope_interleaved": True}, "rope_interleaved"),
    ({"sliding_window": 4096}, "sliding_window"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
    ({"model_type": "starcoder2", "sliding_window": 4096}, "sliding_window"),
    ({"model_type": "starcoder2", "mlp_bias": True}, "mlp_bias"),
]


@pytest.mark.parametrize(("change", "named"), REFUSED_CONFIGS, ids=[str(change)[:50] for change, _ in REFUSED_CONFIGS])
def test_a_config_we_cannot_compute_exactly_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    plain = {**SIZES, "model_type": "llama"}
    with pytest.raises(FamilyError) as caught:
        model_config(plain | change)
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_a_size_that_is_missing_is_named() -> None:
    with pytest.raises(FamilyError, match="vocab_size"):
        model_config({key: value for key, value in SIZES.items() if key != "vocab_size"} | {"model_type": "llama"})


INEXPRESSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"gated_mlp": False}, "gated_mlp false is no llama"),
    ({"normalization": "layernorm"}, "normalization layernorm"),
    ({"model_type": "starcoder2"}, "normalization rmsnorm is no starcoder2"),
    (
        {"model_type": "starcoder2", "normalization": "layernorm", "gated_mlp": False, "mlp_bias": True},
        "use_bias",
    ),
    ({"model_type": "mamba"}, "mamba"),
    ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
    ({"head_dim": 7}, "head_dim 7"),
]


@pytest.mark.parametrize(("change", "named"), INEXPRESSIBLE, ids=[named for _, named in INEXPRESSIBLE])
def test_a_model_its_family_cannot_express_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(FamilyError) as caught:
        hf_config(ModelConfig(**(SIZES | change)), "fp32")
    assert named in str(caught.value) and "\n" not in str(caught.value)
