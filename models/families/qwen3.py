"""The family Qwen3, dense: RMSNorm on each query and key head, and a `head_dim` independent of the hidden size."""

from models.families.qwen2 import QWEN_DEFAULTS
from models.hub.config_parts import switched_window
from models.hub.family import Family

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys={"attention_bias": "attention_bias", "attention_output_bias": "attention_bias"},
    defaults={**QWEN_DEFAULTS, "head_dim": 128},
    fixed={"query_key_norm": "per_head"},
    parts=(switched_window(),),
    kept=("max_window_layers",),
)
