"""Section `model`: the architecture, with Hugging Face's names. Model families are defined in models/families."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from megalite.config.base import (
    DerivedInt,
    NonNegativeInt,
    NotBool,
    Number,
    PositiveFloat,
    PositiveInt,
    Probability,
    Section,
)


class RopeScaling(Section):
    """Scaling of rotary position embedding for longer sequences."""

    rope_type: Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
    """The formula: position interpolation, NTK-aware growth of the base with the length, Llama 3.1, YaRN, LongRoPE."""

    factor: PositiveFloat | None = Field(default=None, examples=[8.0])
    """Ratio of the new length to the original one; every type but `longrope` needs it."""

    original_max_position_embeddings: PositiveInt | None = Field(default=None, examples=[8192])
    """Length of the first training, in tokens. Left out: `model.max_position_embeddings`."""

    low_freq_factor: PositiveFloat | None = Field(default=None, examples=[1.0])
    """`llama3`: wavelengths above original length / this are stretched in full."""

    high_freq_factor: PositiveFloat | None = Field(default=None, examples=[4.0])
    """`llama3`: wavelengths below original length / this stay as they are."""

    attention_factor: PositiveFloat | None = Field(default=None, examples=[1.2])
    """`yarn`, `longrope`: factor of cos and sin. Left out: derived as in the papers."""

    beta_fast: PositiveFloat | None = Field(default=None, examples=[32.0])
    """`yarn`: rotations over the original length above which a dimension stays as it is. Left out: 32."""

    beta_slow: PositiveFloat | None = Field(default=None, examples=[1.0])
    """`yarn`: rotations over the original length below which a dimension is stretched in full. Left out: 1."""

    mscale: Number | None = Field(default=None, examples=[1.0])
    """`yarn` as DeepSeek writes it: a numerator of the attention factor."""

    mscale_all_dim: Number | None = Field(default=None, examples=[1.0])
    """`yarn` as DeepSeek writes it: a denominator of the attention factor."""

    truncate: bool | None = Field(default=None, examples=[False])
    """`yarn`: round the dimensions at which stretching begins and ends to whole ones. Left out: true."""

    short_factor: tuple[PositiveFloat, ...] | None = Field(default=None, examples=[[1.0, 1.1]])
    """`longrope`: a divisor for each pair of dimensions, in sequences up to the original length."""

    long_factor: tuple[PositiveFloat, ...] | None = Field(default=None, examples=[[2.0, 4.0]])
    """`longrope`: a divisor for each pair of dimensions, in longer sequences."""


DERIVED = ("num_key_value_heads", "head_dim", "attention_output_bias", "moe_intermediate_size", "layer_types")
DROPOUTS = ("attention_dropout", "residual_dropout", "embedding_dropout")


MOST_LAYERS = 100_000  # more is a typing error, which a list of them would fill the memory with
LayerType = Literal["full_attention", "sliding_attention"]
# may be left out or null in a file, as base.DerivedInt
DerivedBool = Annotated[bool, BeforeValidator(lambda value: value, json_schema_input_type=bool | None)]
DerivedLayerTypes = Annotated[
    tuple[LayerType, ...], BeforeValidator(lambda value: value, json_schema_input_type=tuple[LayerType, ...] | None)
]


def _same_for_all_layers(data: dict[str, Any]) -> tuple[LayerType, ...]:
    kind: LayerType = "full_attention" if data["sliding_window"] is None else "sliding_attention"
    return (kind,) * int(data["num_hidden_layers"])


class ModelConfig(Section):
    """Shape and mathematics of the transformer."""

    model_type: str = "llama"
    """Model family, Hugging Face's name for it."""

    vocab_size: PositiveInt = Field(examples=[4096])
    """Number of token ids. Any size works with any tensor parallelism: the embedding is padded internally."""

    hidden_size: PositiveInt = Field(examples=[256])
    """Width of the residual stream."""

    intermediate_size: PositiveInt = Field(examples=[704])
    """Width of the feed-forward layer. Any size works with any tensor parallelism."""

    num_hidden_layers: PositiveInt = Field(le=MOST_LAYERS, examples=[6])
    """Number of transformer blocks."""

    num_attention_heads: PositiveInt = Field(examples=[4])
    """Number of query heads; a multiple of `parallel.tensor_parallel_size`."""

    num_key_value_heads: DerivedInt = Field(default_factory=lambda data: data["num_attention_heads"], examples=[2])
    """Number of key and value heads (grouped-query attention). Left out or null: `num_attention_heads`."""

    kv_lora_rank: PositiveInt | None = Field(default=None, examples=[512])
    """Width of the latent from which keys and values of all heads are made (DeepSeek). Null: from the hidden state."""

    q_lora_rank: PositiveInt | None = Field(default=None, examples=[1536])
    """Latent attention: width of the latent from which queries are made. Null: from the hidden state."""

    qk_nope_head_dim: PositiveInt | None = Field(default=None, examples=[128])
    """Latent attention: features of a query and key head without a position, before the rotated ones."""

    qk_rope_head_dim: PositiveInt | None = Field(default=None, examples=[64])
    """Latent attention: rotated features of a query head, and of the key that all heads share."""

    v_head_dim: PositiveInt | None = Field(default=None, examples=[128])
    """Latent attention: width of a value head."""

    # rounded down: rules/model.py refuses a hidden_size that does not divide, with numbers
    head_dim: DerivedInt = Field(
        default_factory=lambda data: (
            (data["qk_nope_head_dim"] or 0) + (data["qk_rope_head_dim"] or 0)
            or data["hidden_size"] // data["num_attention_heads"]
        ),
        examples=[64],
    )
    """Width of one head, even where rotated. Null: `hidden_size / num_attention_heads`, or of latent parts the sum."""

    hidden_act: Literal["silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu"] = "silu"
    """Activation function of the feed-forward layer; `gelu_new` and `gelu_fast` are names of `gelu_pytorch_tanh`."""

    normalization: Literal["rmsnorm", "zero_centered_rmsnorm", "layernorm"] = "rmsnorm"
    """Kind of every norm in the model; `zero_centered_rmsnorm` multiplies by 1 + weight, as Gemma does."""

    norm_placement: Literal["pre", "post", "pre_and_post"] = "pre"
    """Norms of a block: of what attention and feed-forward layer read, of what they put out (OLMo-2), or of both."""

    use_parallel_residual: bool = False
    """Attention and feed-forward layer of a block both read the block's input, and both are added to it (GPT-NeoX)."""

    query_key_norm: Literal["none", "per_head", "full_width"] = "none"
    """Norm of queries and keys before rotation: of each head (Qwen3), or of all heads together (OLMo-2)."""

    gated_mlp: bool = True
    """Feed-forward layer with a gate (SwiGLU with `silu`), instead of two plain projections."""

    attention_bias: bool = False
    """Biases of the query, key and value projections."""

    attention_output_bias: DerivedBool = Field(default_factory=lambda data: data["attention_bias"], examples=[False])
    """Bias of attention's output projection. Left out or null: `attention_bias`."""

    mlp_bias: bool = False
    """Biases in the feed-forward projections."""

    num_experts: PositiveInt | None = Field(default=None, examples=[8])
    """Feed-forward layers of a block, from which a router picks for each token (mixture of experts). Null: one."""

    num_experts_per_tok: PositiveInt = 2
    """Experts that each token goes through; at most `num_experts`."""

    moe_intermediate_size: DerivedInt = Field(default_factory=lambda data: data["intermediate_size"], examples=[512])
    """Width of one expert. Left out or null: `intermediate_size`."""

    norm_topk_prob: bool = True
    """Divide the scores of a token's experts by their sum."""

    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of experts: of all together, or of each by itself (DeepSeek-V3)."""

    fp32_router: bool = False
    """Logits of experts are fp32 where hidden states are 16-bit (DeepSeek, GLM-4-MoE); rounding them moves choices."""

    n_group: PositiveInt = Field(default=1, examples=[8])
    """Groups that the experts of a layer are in, in order; a token's experts are in the best `topk_group` of them."""

    topk_group: PositiveInt = Field(default=1, examples=[4])
    """Groups that the experts of a token may come from; at most `n_group`."""

    group_score: Literal["max", "top2_sum"] = "max"
    """Score of a group: its best expert's (DeepSeek-V2), or the sum of its two best ones' (DeepSeek-V3)."""

    routed_scaling_factor: PositiveFloat = 1.0
    """Factor of the weights of a token's experts, behind `norm_topk_prob`."""

    e_score_correction_bias: bool = False
    """The model has a bias on scores, for the choice of experts alone; `training.router.bias_rate` moves it."""

    n_shared_experts: NonNegativeInt = Field(default=0, examples=[1])
    """Experts that every token goes through besides: one feed-forward layer of as many times the width."""

    mlp_only_layers: tuple[NonNegativeInt, ...] = Field(default=(), examples=[[0]])
    """Blocks, counted from 0, that have one dense feed-forward layer in a model with experts."""

    query_pre_attn_scalar: PositiveFloat | None = Field(default=None, examples=[256.0])
    """Attention scores are divided by the square root of this. Null: `head_dim`."""

    attn_logit_softcapping: PositiveFloat | None = Field(default=None, examples=[50.0])
    """Attention scores x become cap * tanh(x / cap). Null: they stay; the mask of all scores exists where it is set."""

    final_logit_softcapping: PositiveFloat | None = Field(default=None, examples=[30.0])
    """Logits x become cap * tanh(x / cap). Null: no cap."""

    scale_embeddings: bool = False
    """Multiply token embeddings by the square root of `hidden_size`, rounded to the computation's dtype (Gemma)."""

    rms_norm_eps: PositiveFloat = 1e-6
    """Epsilon of every norm, whichever `normalization` is chosen."""

    position_embedding: Literal["rope", "learned"] = "rope"
    """Encoding of a token's position: rotary embedding in attention, or a learned vector per position (GPT-2)."""

    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary position embedding."""

    rope_scaling: RopeScaling | None = Field(default=None, examples=[{"rope_type": "linear", "factor": 2.0}])
    """Rotary embedding for longer sequences than the first training's. Null: plain."""

    partial_rotary_factor: Annotated[float, Field(gt=0, le=1), NotBool] = 1.0
    """Part of each head that is rotated, from its first feature on."""

    rope_local_base_freq: PositiveFloat | None = Field(default=None, examples=[10_000.0])
    """Base of plain rotary embedding in `sliding_attention` layers (Gemma 3). Null: they are as all others."""

    layers_without_rope: tuple[NonNegativeInt, ...] = Field(default=(), examples=[[3]])
    """Blocks, counted from 0, whose attention has no position embedding (SmolLM3)."""

    sliding_window: PositiveInt | None = Field(default=None, examples=[4096])
    """Tokens that a token of a `sliding_attention` layer sees, itself included. Null: no layer has a window."""

    layer_types: DerivedLayerTypes = Field(
        default_factory=_same_for_all_layers, examples=[["sliding_attention", "full_attention"]]
    )
    """Attention of each block. Left out or null: all sliding where `sliding_window` is set, else all full."""

    max_position_embeddings: PositiveInt = 2048
    """Longest sequence the model is meant for, in tokens."""

    tie_word_embeddings: bool = False
    """Use the embedding's weight as the output head's."""

    initializer_range: PositiveFloat = 0.02
    """Standard deviation of the initial weights."""

    attention_dropout: Probability = 0.0
    """Fraction of attention probabilities dropped in training; all then exist, `sequence_length` squared a head."""

    residual_dropout: Probability = 0.0
    """Fraction of the numbers that attention and feed-forward layer add to the residual stream dropped in training."""

    embedding_dropout: Probability = 0.0
    """Fraction of the numbers of the token embeddings dropped in training."""

    def has_window(self, layer: int) -> bool:
        """Returns whether attention of block `layer` sees only `sliding_window` tokens."""
        return self.layer_types[layer] == "sliding_attention"

    def has_experts(self, layer: int) -> bool:
        """Returns whether block `layer` has a router and experts."""
        return self.num_experts is not None and layer not in self.mlp_only_layers

    @property
    def shared_size(self) -> int:
        """Width of the feed-forward layer beside a router's experts; 0 without one."""
        return self.n_shared_experts * self.moe_intermediate_size

    def rotary_dim(self, layer: int) -> int:
        """Returns the number of features of each head that block `layer` rotates, from the first on."""
        if self.position_embedding != "rope" or layer in self.layers_without_rope:
            return 0
        return self.rotated_features

    @property
    def rotated_features(self) -> int:
        """Features of each head that are rotated in layers with rotary embedding."""
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def has_dropout(self) -> bool:
        """True if training needs sample numbers, from which dropout masks are computed, equal on every layout."""
        return any(getattr(self, name) > 0 for name in DROPOUTS)

    @model_validator(mode="before")
    @classmethod
    def _null_means_derived(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if not (key in DERIVED and value is None)}
