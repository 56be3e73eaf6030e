"""The family Gemma 2: norms around attention and feed-forward layer, soft caps, a window in every other layer."""

from typing import Any

from megalite.config import ModelConfig
from models.hub.config_parts import ConfigPart, FamilyError, Keys, typed_layers
from models.hub.family import Family

SCALAR = "query_pre_attn_scalar"


def _read_score_scale(keys: Keys) -> dict[str, Any]:
    if keys[SCALAR] is None:
        raise FamilyError(f"config.json has {SCALAR} null, which transformers does not run")
    return {SCALAR: keys[SCALAR]}


def _write_score_scale(model: ModelConfig, _: Keys) -> dict[str, Any]:
    scalar = model.head_dim if model.query_pre_attn_scalar is None else model.query_pre_attn_scalar
    if int(scalar) != scalar:
        raise FamilyError(f"model.{SCALAR} {scalar} is a whole number in a {model.model_type} model")
    return {SCALAR: int(scalar)}


SCORE_SCALE = ConfigPart((SCALAR,), (SCALAR,), _read_score_scale, _write_score_scale)
GEMMA_KEYS = {
    "hidden_act": "hidden_activation",
    "attention_bias": "attention_bias",
    "attention_output_bias": "attention_bias",
    "final_logit_softcapping": "final_logit_softcapping",
}
GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA_FIXED = {"normalization": "zero_centered_rmsnorm", "norm_placement": "pre_and_post", "scale_embeddings": True}

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    keys={**GEMMA_KEYS, "attn_logit_softcapping": "attn_logit_softcapping"},
    defaults={
        **GEMMA_DEFAULTS,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    fixed=GEMMA_FIXED,
    parts=(typed_layers(full_every=2), SCORE_SCALE),
    must_be={"use_bidirectional_attention": False},
    kept=("hidden_act", "sliding_window_size"),  # in folders of the hub, but unused
)
