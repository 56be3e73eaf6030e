"""The family Llama, all models of type `llama`: Llama 2 and 3.x, TinyLlama, SmolLM2, Yi, DeepSeek's distillations."""

from models.hub.family import Family

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys={"attention_bias": "attention_bias", "attention_output_bias": "attention_bias", "mlp_bias": "mlp_bias"},
    must_be={"rope_interleaved": False},
    kept=("is_llama_config",),
)
