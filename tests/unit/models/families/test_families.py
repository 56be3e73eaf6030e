"""A family says in data what transformers computes: logits, gradients, and where weights lie on disk."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from launch.conversion.huggingface.serial_model import global_shapes, serial_model
from launch.reference.models import HEAD, Rows, TransformersModel
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import SerialModel, named_shards
from megalite.parallel.loss import head_logits, head_loss
from models.families import FAMILIES, family, model_config
from models.hub.tensor_layout import HubLayout
from tests.helpers.hub_models import (
    HUB_MODELS,
    LLAMA3,
    ROUTER_BIAS,
    YARN,
    HubModel,
    disk_tensors,
    hub_models,
    longrope,
)

pytestmark = pytest.mark.usefixtures("one_thread")

WORST_ROUNDING = 5e-5  # of any draw, e.g. where a norm divides by small numbers


@pytest.mark.parametrize("hub_model", HUB_MODELS, ids=str)
def test_decoder_computes_what_transformers_computes_forward_and_backward(hub_model: HubModel) -> None:
    """Catches a wrong switch, epsilon, activation, bias, name, window, angle; the rest is rounding of fused GEMMs."""
    check_logits_and_gradients(hub_model, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", FAMILIES)
@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_switches_of_a_family_compute_what_transformers_computes(model_type: str, data: st.DataObject) -> None:
    check_logits_and_gradients(data.draw(hub_models(model_type)), WORST_ROUNDING)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3"])
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_logits_of_any_switches_are_transformers_in_float64(model_type: str, data: st.DataObject) -> None:
    """1e-6 of their spread: rotary angles are fp32 in both, everything else is exact to 1e-13."""
    hub_model = data.draw(hub_models(model_type))
    module, model = hub_model.build(), options_of(hub_model)
    ours = our_model(model, disk_tensors(module)).double()
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.double()
    for name, buffer in kept.items():
        setattr(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], buffer)
    tokens = torch.randint(model.vocab_size, (2, 33))
    with torch.no_grad():
        theirs = TransformersModel(model, module).outputs(Rows(tokens))[HEAD]
        assert (our_logits(ours, model, tokens) - theirs).abs().max() <= 1e-6 * theirs.std()


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", FAMILIES)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_many_switches_of_a_family_compute_what_transformers_computes(model_type: str, data: st.DataObject) -> None:
    check_logits_and_gradients(data.draw(hub_models(model_type)), WORST_ROUNDING)


def options_of(hub_model: HubModel) -> ModelConfig:
    return ModelConfig.model_validate(model_config(hub_model.config().to_diff_dict()))


def layout_of(model: ModelConfig) -> HubLayout:
    return family(model.model_type).layout(model, global_shapes(model))


@pytest.mark.parametrize("hub_model", [model for model in HUB_MODELS if model.name in FAMILIES], ids=str)
def test_a_family_says_which_projections_are_tensors_of_their_own(hub_model: HubModel) -> None:
    """Adapters of others have no place in a PEFT folder, and a run must say so before it trains."""
    model = options_of(hub_model)
    layout = layout_of(model)
    for name in global_shapes(model):
        if name.endswith("_proj.weight"):
            tensors = [layout.tensors[hub] for hub in layout.hub_names(name)]
            is_whole = len(tensors) == 1 and len(tensors[0].runs) == 1 and not tensors[0].transposed
            assert family(model.model_type).has_own_tensor(name.split(".")[-2]) == is_whole, name


def our_model(model: ModelConfig, weights: dict[str, Tensor]) -> SerialModel:
    read = partial(layout_of(model).read_own, lambda name, source: weights[name][source])
    return serial_model(model, TensorParallel(), read)


def our_logits(ours: SerialModel, model: ModelConfig, tokens: Tensor) -> Tensor:
    hidden, head = ours(tokens)
    return head_logits(hidden, head, model.vocab_size, TensorParallel(), model.final_logit_softcapping)


def check_logits_and_gradients(hub_model: HubModel, tolerance: float) -> None:
    """Sequences are longer than every window and every length from which on rotary embedding is scaled."""
    theirs = hub_model.build()
    model = options_of(hub_model)
    layout = layout_of(model)
    ours = our_model(model, disk_tensors(theirs))

    tokens = torch.randint(model.vocab_size, (3, 33))
    targets = torch.randint(model.vocab_size, (3, 33))
    logits = theirs(tokens).logits
    hidden, head = ours(tokens)
    found = head_logits(hidden, head, model.vocab_size, TensorParallel(), model.final_logit_softcapping)
    assert (found - logits).abs().max() <= tolerance * logits.std()

    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    head_loss(hidden, head, targets, model.vocab_size, TensorParallel(), model.final_logit_softcapping).backward()
    gradients = disk_tensors(theirs, gradients=True)
    assert set(gradients) == {name for name in layout.tensors if not name.endswith(ROUTER_BIAS)}
    # a key's bias moves all scores of a query alike, so that its gradient is nothing but rounding
    rounding = 1e-7 * torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for _, parameter in named_shards(ours):
        for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
            expected = layout.read_own(lambda name, source: gradients[name][source], piece.name, piece.source)
            assert parameter.grad[piece.target].sub(expected).norm() <= tolerance * expected.norm() + rounding, (
                piece.name
            )


@pytest.mark.parametrize("hub_model", HUB_MODELS, ids=str)
def test_layout_is_what_transformers_writes(hub_model: HubModel, tmp_path: Path) -> None:
    """Names on disk are not those of modules (experts, GPT-NeoX's head), and a tied head is not there."""
    model = options_of(hub_model)
    layout = layout_of(model)
    saved = load_file(hub_model.save(tmp_path) / "model.safetensors")
    assert {name: tensor.shape for name, tensor in layout.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }
    assert (family(model.model_type).head in layout.tensors) is not model.tie_word_embeddings
    prefix = family(model.model_type).base_prefix
    assert all(name.startswith(prefix) or name == family(model.model_type).head for name in saved)


BY_NAME = {hub_model.name: hub_model for hub_model in HUB_MODELS}
MISTAKES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_theta": 4e5}),
    ("llama", {"rms_norm_eps": 1e-3}),
    ("llama-linear", {"rope_scaling": None}),
    ("llama-dynamic", {"max_position_embeddings": 32}),
    ("llama-3.1", {"rope_scaling": {**LLAMA3, "factor": 32.0}}),
    ("llama-deepseek-yarn", {"rope_scaling": YARN}),
    ("llama-longrope", {"rope_scaling": longrope(6, factor=4.0)}),
    ("llama-geglu", {"hidden_act": "gelu"}),
    ("mistral", {"sliding_window": 8}),
    ("mistral", {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"query_pre_attn_scalar": 16}),
    ("gemma2", {"scale_embeddings": False}),
    ("gemma2", {"normalization": "rmsnorm"}),
    ("gemma3", {"rope_local_base_freq": None}),
    ("phi4-mini", {"partial_rotary_factor": 0.5, "rope_scaling": longrope(4)}),
    ("gpt_neox", {"use_parallel_residual": False}),
    ("gpt_neox", {"partial_rotary_factor": 0.5}),
    ("smollm3", {"layers_without_rope": []}),
    ("mixtral", {"norm_topk_prob": False}),
    ("mixtral", {"num_experts_per_tok": 3}),
    ("deepseek_v2", {"routed_scaling_factor": 1.2}),
    ("deepseek_v2-groups-yarn", {"topk_group": 1}),
    ("deepseek_v3", {"scoring_func": "softmax"}),
    ("deepseek_v3", {"norm_topk_prob": False}),
    ("deepseek_v3", {"group_score": "max"}),
    ("deepseek_v3-plain-queries", {"rope_scaling": YARN}),
    ("glm4_moe", {"partial_rotary_factor": 1.0}),
    ("glm4_moe", {"query_key_norm": "none"}),
    ("glm4_moe", {"topk_group": 1}),
    ("glm4_moe-no-groups", {"norm_topk_prob": True}),
    ("olmoe", {"norm_topk_prob": True}),
    ("olmoe", {"query_key_norm": "none"}),
]


@pytest.mark.parametrize(("name", "mistake"), MISTAKES, ids=[f"{name}-{next(iter(m))}" for name, m in MISTAKES])
def test_a_mistake_in_an_option_is_far_above_rounding(name: str, mistake: dict[str, Any]) -> None:
    """Else these models would agree whatever a family says."""
    model = options_of(BY_NAME[name])
    wrong = ModelConfig.model_validate(model.model_dump() | mistake)
    weights = disk_tensors(BY_NAME[name].build())
    tokens = torch.randint(model.vocab_size, (3, 33))
    right = our_logits(our_model(model, weights), model, tokens)
    difference = (our_logits(our_model(wrong, weights), wrong, tokens) - right).abs().max() / right.std()
    assert difference > 10 * WORST_ROUNDING
