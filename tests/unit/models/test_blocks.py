"""Blocks of every kind in whole models: logits and every gradient against transformers'."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import BlockInput, LayerSpec, SerialModel, make_layer, named_shards
from megalite.parallel.loss import head_logits, head_loss
from models.decoder import DecoderBlock, PositionEmbedding, TokenEmbedding, decoder_layers
from tests.helpers.sizes import ODD_SIZES

SERIAL = TensorParallel()
SEQ = 33
SIZES = ODD_SIZES | {"max_position_embeddings": 40}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA2 = {
    "norm_placement": "pre_and_post",
    "normalization": "zero_centered_rmsnorm",
    "hidden_act": "gelu_pytorch_tanh",
    "scale_embeddings": True,
    "final_logit_softcapping": 2.0,
    "attn_logit_softcapping": 50.0,
    "query_pre_attn_scalar": 9.0,
    "sliding_window": 8,
    "layer_types": SLIDING,
    "tie_word_embeddings": True,
}
OLMO2 = {"norm_placement": "post", "query_key_norm": "full_width"}
PLAIN_BIASED = {"normalization": "layernorm", "gated_mlp": False, "attention_bias": True, "mlp_bias": True}
NEOX = PLAIN_BIASED | {"hidden_act": "gelu", "partial_rotary_factor": 0.5}
GPT2 = PLAIN_BIASED | {"hidden_act": "gelu_new", "position_embedding": "learned", "tie_word_embeddings": True}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 29}


@dataclass(frozen=True)
class Pair:
    """A family with transformers' switches, and the same thing in our words."""

    name: str
    model_type: str
    switches: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def model(self) -> ModelConfig:
        return ModelConfig.model_validate(SIZES | self.options)

    def theirs(self) -> Any:
        import transformers  # here, so that ranks do not

        torch.manual_seed(5)
        same = {"pad_token_id": 0, "use_cache": False, "tie_word_embeddings": self.model.tie_word_embeddings}
        config = transformers.AutoConfig.for_model(self.model_type, **(SIZES | same | self.switches))
        config._experts_implementation = "eager"
        hub = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        vectors = 0.0 if self.model.normalization == "zero_centered_rmsnorm" else 0.8
        with torch.no_grad():
            for parameter in hub.parameters():  # biases of 0 and norms of 1 would hide a missing one
                parameter.normal_(vectors if parameter.ndim == 1 else 0.0, 0.2)
        return hub

    def __str__(self) -> str:
        return self.name


KV = {"num_key_value_heads": 2}
PAIRS = [
    Pair(
        "gemma2",
        "gemma2",
        KV
        | {"head_dim": 12, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 9, "sliding_window": 8}
        | {"layer_types": SLIDING},
        GEMMA2 | KV,
    ),
    Pair("olmo2", "olmo2", KV | {"rms_norm_eps": 1e-6, "rope_theta": 1e4}, OLMO2 | KV),
    Pair(
        "neox-parallel", "gpt_neox", {"layer_norm_eps": 1e-6, "rotary_pct": 0.5}, NEOX | {"use_parallel_residual": True}
    ),
    Pair(
        "neox-sequential",
        "gpt_neox",
        {"layer_norm_eps": 1e-6, "rotary_pct": 0.5, "use_parallel_residual": False, "hidden_act": "relu"},
        NEOX | {"hidden_act": "relu"},
    ),
    Pair("gpt2", "gpt2", {"layer_norm_epsilon": 1e-6, "n_inner": 101}, GPT2),
    Pair(
        "mixtral",
        "mixtral",
        KV | {"intermediate_size": 29, "num_local_experts": 5, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
        KV | EXPERTS,
    ),
    Pair(
        "qwen3-moe",
        "qwen3_moe",
        KV
        | {
            "head_dim": 12,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 29,
            "norm_topk_prob": False,
        }
        | {"mlp_only_layers": [1], "rope_theta": 1e4},
        KV | EXPERTS | {"norm_topk_prob": False, "mlp_only_layers": [1], "query_key_norm": "per_head"},
    ),
]

RENAMED = [
    ("transformer.wte", "model.embed_tokens"),
    ("transformer.wpe", "model.embed_positions"),
    ("transformer.ln_f", "model.norm"),
    ("transformer.h.", "model.layers."),
    (".ln_1.", ".input_layernorm."),
    (".ln_2.", ".post_attention_layernorm."),
    (".mlp.c_fc.", ".mlp.up_proj."),
    (".mlp.c_proj.", ".mlp.down_proj."),
    (".attn.c_proj.", ".self_attn.o_proj."),
    ("gpt_neox.embed_in", "model.embed_tokens"),
    ("gpt_neox.final_layer_norm", "model.norm"),
    ("gpt_neox.", "model."),
    (".dense_h_to_4h.", ".up_proj."),
    (".dense_4h_to_h.", ".down_proj."),
    (".attention.dense.", ".self_attn.o_proj."),
    ("embed_out", "lm_head"),
]


def canonical(theirs: dict[str, Tensor], heads: int = 4) -> dict[str, Tensor]:
    """Tensors of a transformers model (or their gradients) under our names: fused ones cut, GPT-2's transposed."""
    ours: dict[str, Tensor] = {}
    for their_name, value in theirs.items():
        name = their_name
        for old, new in RENAMED:
            name = name.replace(old, new)
        if re.search(r"\.(c_attn|c_fc|c_proj)\.weight", their_name):
            value = value.t()
        path, leaf = name.rsplit(".", 1)
        block = path.rsplit(".", 2)[0]
        if path.endswith("attn.c_attn"):
            ours |= {f"{block}.self_attn.{p}_proj.{leaf}": x for p, x in zip("qkv", value.chunk(3), strict=True)}
        elif path.endswith("query_key_value"):
            parts = value.unflatten(0, (heads, 3, -1)).unbind(1)
            ours |= {f"{block}.self_attn.{p}_proj.{leaf}": x.flatten(0, 1) for p, x in zip("qkv", parts, strict=True)}
        elif leaf == "gate_up_proj":
            for expert, (gate, up) in enumerate(x.chunk(2) for x in value):
                ours |= {f"{path}.{expert}.gate_proj.weight": gate, f"{path}.{expert}.up_proj.weight": up}
        elif leaf == "down_proj":
            ours |= {f"{path}.{expert}.down_proj.weight": x for expert, x in enumerate(value)}
        else:
            ours[name] = value
    return ours


def built(
    model: ModelConfig, tp: TensorParallel = SERIAL, recompute: Any = "none", seed: int = 3, spread: float = 0.2
) -> SerialModel:
    make = partial(make_layer, seed=seed, initializer_range=spread)
    return SerialModel(decoder_layers(model, recompute), tp, make)


def with_weights(model: ModelConfig, weights: dict[str, Tensor]) -> SerialModel:
    ours = built(model)
    with torch.no_grad():
        for _, parameter in named_shards(ours):
            for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
                assert weights[piece.name].shape == piece.shape, piece.name
                parameter[piece.target] = weights[piece.name][piece.source]
    return ours


def logits_of(model: ModelConfig, ours: SerialModel, tokens: Tensor, positions: Tensor | None) -> Tensor:
    hidden, head = ours(tokens, positions)
    return head_logits(hidden, head, model.vocab_size, SERIAL, model.final_logit_softcapping)


TOKENS = torch.randint(131, (2, SEQ), generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(131, (2, SEQ), generator=torch.Generator().manual_seed(2))
PACKED = torch.tensor([[*range(10), 0, *range(22)], [*range(21), *range(12)]])


@pytest.mark.parametrize("positions", [None, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_logits_and_every_gradient_are_transformers(pair: Pair, positions: Tensor | None) -> None:
    theirs, model = pair.theirs(), pair.model
    ours = with_weights(model, canonical(dict(theirs.named_parameters())))
    expected = theirs(TOKENS, position_ids=positions).logits
    found = logits_of(model, ours, TOKENS, positions)
    assert (found - expected).abs().max() <= 1e-5 * expected.std()  # fp32, sums in another order

    torch.nn.functional.cross_entropy(expected.flatten(0, 1), TARGETS.flatten(), reduction="sum").backward()
    hidden, head = ours(TOKENS, positions)
    head_loss(hidden, head, TARGETS, model.vocab_size, SERIAL, model.final_logit_softcapping).backward()
    gradients = canonical({name: parameter.grad for name, parameter in theirs.named_parameters()})
    compared = set()
    for _, parameter in named_shards(ours):
        for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
            want = gradients[piece.name]
            # of the keys' bias all scores shift alike, where nothing is rotated: rounding, which is another one on each
            # kind of processor, is its gradient
            scale = gradients[piece.name.replace("k_proj.bias", "q_proj.bias")].norm()
            bound = (1e-4 if piece.name.endswith("k_proj.bias") else 2e-5) * scale
            assert (parameter.grad[piece.target] - want).norm() <= bound, piece.name  # type: ignore[index]
            compared.add(piece.name)
    assert compared == gradients.keys()


MISREADINGS: list[tuple[str, dict[str, Any]]] = [
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"scale_embeddings": False}),
    ("gemma2", {"normalization": "rmsnorm"}),
    ("neox-parallel", {"use_parallel_residual": False}),
    ("neox-parallel", {"hidden_act": "gelu_new"}),
    ("neox-sequential", {"hidden_act": "gelu"}),
    ("gpt2", {"hidden_act": "gelu"}),
    ("mixtral", {"norm_topk_prob": False}),
    ("mixtral", {"num_experts_per_tok": 3}),
    ("qwen3-moe", {"norm_topk_prob": True}),
]


@pytest.mark.parametrize(("name", "wrong"), MISREADINGS, ids=str)
def test_a_misread_switch_would_be_seen(name: str, wrong: dict[str, Any]) -> None:
    """That the comparison above is not blind to it: the smallest of these moves logits by 2e-4 of their spread."""
    pair = next(pair for pair in PAIRS if pair.name == name)
    theirs = pair.theirs()
    model = ModelConfig.model_validate(SIZES | pair.options | wrong)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        found = logits_of(model, with_weights(model, canonical(dict(theirs.named_parameters()))), TOKENS, None)
    assert (found - expected).abs().max() > 1e-4 * expected.std()


def test_norms_of_a_block_have_transformers_names() -> None:
    named = {
        "pre": {"input_layernorm", "post_attention_layernorm"},
        "post": {"post_attention_layernorm", "post_feedforward_layernorm"},
        "pre_and_post": {
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        },
    }
    for placement, names in named.items():
        model = ModelConfig.model_validate(SIZES | {"norm_placement": placement})
        block = DecoderBlock(model, "none", 0, SERIAL)
        assert {path.split(".")[0] for path, _ in block.named_parameters()} == names | {"self_attn", "mlp"}


def test_scaled_embeddings_are_gemmas_bits() -> None:
    """The factor is rounded to bf16 before the product, which is another number than the rounded product."""
    from transformers.models.gemma2.modeling_gemma2 import Gemma2TextScaledWordEmbedding

    model = ModelConfig.model_validate(SIZES | {"scale_embeddings": True})
    ours = make_layer(LayerSpec("e", lambda tp: TokenEmbedding(model, tp), 0.0), SERIAL, seed=1, initializer_range=1.0)
    theirs = Gemma2TextScaledWordEmbedding(131, 48, 0, embed_scale=48**0.5).bfloat16()
    with torch.no_grad():
        theirs.weight.copy_(ours.bfloat16().weight)  # type: ignore[arg-type]
    assert torch.equal(ours(BlockInput(TOKENS)).hidden, theirs(TOKENS))


def _position_layer(**options: Any) -> PositionEmbedding:
    model = ModelConfig.model_validate(SIZES | GPT2 | options)
    spec = next(spec for spec in decoder_layers(model) if spec.name == "model.embed_positions")
    layer = make_layer(spec, SERIAL, seed=1, initializer_range=1.0)
    assert isinstance(layer, PositionEmbedding)
    return layer


def test_positions_go_on_from_an_offset() -> None:
    layer, zeros = _position_layer(), BlockInput(torch.zeros(2, 3, 48))
    layer.offset = 5
    assert torch.equal(layer(zeros).hidden, layer.weight[5:8].expand(2, 3, 48))
    layer.offset = 38  # of 40 positions, two are left: three would be one short, or a broadcast
    with pytest.raises(AssertionError, match="41 tokens, but there are 40"):
        layer(zeros)


def test_learned_positions_stand_between_the_embedding_and_the_first_block() -> None:
    names = [spec.name for spec in decoder_layers(ModelConfig.model_validate(SIZES | GPT2))]
    assert names[:3] == ["model.embed_tokens", "model.embed_positions", "model.layers.0"]
    assert names[-1] == "model.embed_tokens"  # tied: on the last stage too, without positions
    assert "model.embed_positions" not in [spec.name for spec in decoder_layers(ModelConfig.model_validate(SIZES))]


def test_dropout_is_of_the_sum_of_both_embeddings() -> None:
    model = ModelConfig.model_validate(SIZES | GPT2 | {"embedding_dropout": 0.4})
    tokens, positions = decoder_layers(model)[:2]
    embed, add = (make_layer(spec, SERIAL, seed=1, initializer_range=1.0) for spec in (tokens, positions))
    inputs = BlockInput(TOKENS, sample_ids=torch.arange(2))
    whole = add(embed(inputs)).hidden
    add.eval()
    kept = whole != 0
    torch.testing.assert_close(whole[kept], add(embed(inputs)).hidden[kept] / 0.6)
    assert 0.55 < kept.double().mean() < 0.65


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, GEMMA2, OLMO2, NEOX | {"use_parallel_residual": True}, NEOX | {"hidden_act": "relu"}, GPT2, EXPERTS],
    ids=str,
)
def test_recomputation_changes_no_bit(options: dict[str, Any], dtype: torch.dtype) -> None:
    """Routing again must send every token where it went before; a norm computed again has the same rounding."""
    model = ModelConfig.model_validate(SIZES | options | {"residual_dropout": 0.2, "embedding_dropout": 0.1})
    seen = []
    for recompute in ("none", "selective", "full"):
        ours = built(model, recompute=recompute).to(dtype)
        hidden, head = ours(TOKENS, PACKED, torch.arange(2))
        loss = head_loss(hidden, head, TARGETS, 131, SERIAL, model.final_logit_softcapping)
        loss.backward()
        seen.append([loss.detach(), *(parameter.grad for parameter in ours.parameters())])
    for once, selected, again in zip(*seen, strict=True):
        assert once is not None and again is not None
        assert torch.equal(once, selected) and torch.equal(once, again)
