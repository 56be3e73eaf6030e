"""The family StarCoder2: LayerNorm, a plain GELU feed-forward layer, biases everywhere, a sliding window."""

from models.hub.config_parts import one_window
from models.hub.family import Family

STARCODER2 = Family(
    model_type="starcoder2",
    architecture="Starcoder2ForCausalLM",
    keys={
        "attention_bias": "use_bias",
        "attention_output_bias": "use_bias",
        "mlp_bias": "use_bias",
        "rms_norm_eps": "norm_epsilon",
    },
    defaults={
        "num_key_value_heads": 2,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "norm_epsilon": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "initializer_range": 0.018042,
    },
    fixed={"normalization": "layernorm", "gated_mlp": False},
    parts=(one_window(),),
    must_be={"norm_type": "layer_norm", "mlp_type": "default"},
    kept=(
        *("residual_dropout", "embedding_dropout"),
        # remnants of StarCoder 1 in folders of the hub, which nothing reads
        *("attention_softmax_in_fp32", "layer_norm_epsilon", "scale_attention_softmax_in_fp32", "scale_attn_weights"),
    ),
    renamed={"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"},
)
