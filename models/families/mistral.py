"""The families Mistral, with one sliding window for all layers or none, and Ministral, whose layers differ."""

from models.hub.config_parts import one_window, typed_layers
from models.hub.family import Family

_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}

MISTRAL = Family(model_type="mistral", architecture="MistralForCausalLM", defaults=_DEFAULTS, parts=(one_window(),))

MINISTRAL = Family(
    model_type="ministral",
    architecture="MinistralForCausalLM",
    defaults={**_DEFAULTS, "head_dim": None},  # always written: transformers' class does not derive it
    parts=(typed_layers(),),
    other_architectures=("MistralForCausalLM",),
)
