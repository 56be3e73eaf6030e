"""The family Qwen2, with Qwen2.5: biases of queries, keys and values, and a sliding window that is usually off."""

from models.hub.config_parts import switched_window
from models.hub.family import Family

QWEN_DEFAULTS = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    defaults=QWEN_DEFAULTS,
    fixed={"attention_bias": True},
    parts=(switched_window(),),
    must_be={"use_mrope": False},
    kept=("max_window_layers", "dual_chunk_attention_config"),  # vLLM's, for more than 256k tokens; unused here
)
