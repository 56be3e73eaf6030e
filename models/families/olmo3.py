"""The family OLMo-3: OLMo-2 with a sliding window in three of every four layers, and YaRN rotation in the fourth."""

from models.hub.config_parts import typed_layers
from models.hub.family import Family
from models.hub.rope_config import two_ropes

OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    keys={"attention_bias": "attention_bias", "attention_output_bias": "attention_bias"},
    defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096},
    fixed={"norm_placement": "post", "query_key_norm": "full_width"},
    parts=(typed_layers(full_every=4), two_ropes(theta=5e5, local_theta=5e5)),
)
