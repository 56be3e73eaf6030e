"""The family OLMo-2: RMSNorm on the outputs of attention and feed-forward layer and on all heads of q and k at once."""

from models.hub.family import Family

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys={"attention_bias": "attention_bias", "attention_output_bias": "attention_bias"},
    defaults={"rms_norm_eps": 1e-5},
    fixed={"norm_placement": "post", "query_key_norm": "full_width"},
)
