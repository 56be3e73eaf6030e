"""One configurable decoder, as a list of layers: embedding, blocks, final norm, output head.

In: token ids `[batch, seq]`, beside them positions `[batch, seq]` where documents are masked, and sample numbers
`[batch]` where dropout is on. Between layers: hidden states `[batch, seq, hidden]` (`[batch, seq/tp, hidden]` under
sequence parallelism), both riding along.
Out of the last layer: hidden states and the head's local weight, which `megalite.parallel.loss` turns into a loss
without ever holding all logits. Math follows transformers' models; ranks, files and optimizers are unknown here.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.dropout import Dropout
from megalite.parallel.layers import LayerSpec, Payload, Recompute, recomputed
from megalite.parallel.linear import VocabParallelEmbedding, sharded_parameter
from megalite.parallel.norm import LayerNorm, RMSNorm
from megalite.parallel.shard import Shard
from models.attention import Attention
from models.feed_forward import MLP

HeadOutput = tuple[Tensor, Tensor]  # hidden states, the head's local weight [vocab/tp, hidden]


def decoder_layers(model: ModelConfig, recompute: Recompute = "none") -> list[LayerSpec]:
    """The decoder of `model` as layer specs, in order; the single definition every engine builds from."""
    hidden = model.hidden_size
    head_dim, heads, kv_heads = model.head_dim, model.num_attention_heads, model.num_key_value_heads
    # multiply-adds per token, the common factor of forward and backward; attention scores left out
    matrices = hidden * head_dim * (2 * heads + 2 * kv_heads) + hidden * model.intermediate_size * (
        3 if model.gated_mlp else 2
    )
    embedding = LayerSpec(
        name="model.embed_tokens",
        build=partial(TokenEmbedding, model),
        cost=0.0,
        tied_to="model.embed_tokens" if model.tie_word_embeddings else None,
    )
    blocks = [
        LayerSpec(
            name=f"model.layers.{index}",
            build=partial(DecoderBlock, model, recompute, index),
            cost=float(matrices),
            is_block=True,
        )
        for index in range(model.num_hidden_layers)
    ]
    norm = LayerSpec("model.norm", partial(_norm, model), cost=0.0)
    head_cost = float(hidden * model.vocab_size)
    if model.tie_word_embeddings:
        head = LayerSpec(embedding.name, embedding.build, head_cost, tied_to=embedding.tied_to, forward=_tied_head)
    else:
        head = LayerSpec("lm_head", lambda tp: OutputHead(model.vocab_size, hidden, tp), head_cost)
    return [embedding, *blocks, norm, head]


def _norm(model: ModelConfig, tp: TensorParallel) -> nn.Module:
    return (RMSNorm if model.normalization == "rmsnorm" else LayerNorm)(model.hidden_size, model.rms_norm_eps, tp)


def _tied_head(embedding: nn.Module, hidden: Tensor) -> HeadOutput:
    assert isinstance(embedding.weight, Tensor)
    return hidden, embedding.weight


def _parts(payload: Payload) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """What is computed on, positions `[batch, seq]`, sample numbers `[batch]`; None for what does not ride along."""
    first, *riders = (payload,) if isinstance(payload, Tensor) else payload
    by_dims = {rider.ndim: rider for rider in riders}
    return first, by_dims.get(2), by_dims.get(1)


class TokenEmbedding(VocabParallelEmbedding):
    """The first layer: embeds the tokens and passes on what rides along."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__(model.vocab_size, model.hidden_size, tp)
        self.dropout = Dropout(model.embedding_dropout, tp)

    def forward(self, payload: Payload) -> Payload:  # type: ignore[override]  # a tuple goes in and out
        tokens, _, samples = _parts(payload)
        hidden = self.dropout(super().forward(tokens), samples)
        return hidden if isinstance(payload, Tensor) else (hidden, *payload[1:])


class OutputHead(nn.Module):
    """The untied head: owns its rows of the vocabulary; the GEMM happens inside the loss."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.weight = sharded_parameter(Shard((vocab_size, hidden_size), 0, (("", vocab_size),), tp.size, tp.rank))

    def forward(self, hidden: Tensor) -> HeadOutput:
        return hidden, self.weight


class DecoderBlock(nn.Module):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(self, model: ModelConfig, recompute: Recompute, layer: int, tp: TensorParallel) -> None:
        super().__init__()
        self.recompute, self.is_last = recompute, layer == model.num_hidden_layers - 1
        self.input_layernorm = _norm(model, tp)
        self.self_attn = Attention(model, layer, tp, recompute)
        self.post_attention_layernorm = _norm(model, tp)
        self.mlp = MLP(model, tp)
        self.attention_output_dropout = Dropout(model.residual_dropout, tp)
        self.mlp_output_dropout = Dropout(model.residual_dropout, tp)

    def forward(self, payload: Payload) -> Payload:
        """`[batch, seq(/tp), hidden]` -> the same; what rides along is passed on to the next block."""
        parts = _parts(payload)
        if self.recompute == "full" and torch.is_grad_enabled():
            hidden = recomputed(self._block, *parts)
        else:
            hidden = self._block(*parts)
        return hidden if isinstance(payload, Tensor) or self.is_last else (hidden, *payload[1:])

    def _block(self, hidden: Tensor, positions: Tensor | None, samples: Tensor | None) -> Tensor:
        # residuals are added in place, to the GEMM results that nobody else reads
        attended = self.self_attn(self.input_layernorm(hidden), positions, samples)
        hidden = self.attention_output_dropout(attended, samples).add_(hidden)
        fed_forward = self.mlp(self.post_attention_layernorm(hidden))
        return self.mlp_output_dropout(fed_forward, samples).add_(hidden)
