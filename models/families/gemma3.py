"""The family Gemma 3, text only: as Gemma 2, but norms of queries and keys for soft caps, two rotary bases."""

from models.families.gemma2 import GEMMA_DEFAULTS, GEMMA_FIXED, GEMMA_KEYS, SCORE_SCALE
from models.hub.config_parts import typed_layers
from models.hub.family import Family
from models.hub.rope_config import two_ropes

GEMMA3 = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    other_architectures=("Gemma3TextModel",),  # without the head
    keys=GEMMA_KEYS,
    defaults={**GEMMA_DEFAULTS, "max_position_embeddings": 131072, "final_logit_softcapping": None},
    fixed={**GEMMA_FIXED, "query_key_norm": "per_head"},
    parts=(
        typed_layers(full_every=6, period_key="sliding_window_pattern"),
        two_ropes(theta=1e6, local_theta=1e4, local_key="rope_local_base_freq"),
        SCORE_SCALE,
    ),
    must_be={"use_bidirectional_attention": False, "attn_logit_softcapping": None},  # transformers ignores the cap
    kept=("hidden_act", "sliding_window_pattern", "_sliding_window_pattern"),
)
