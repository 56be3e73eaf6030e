"""One configurable decoder, as a list of layers: embedding, blocks, final norm, output head.

In: token ids `[batch, seq]`, beside them positions `[batch, seq]` where documents are masked, and sample numbers
`[batch]` where dropout is on. Between layers: hidden states `[batch, seq, hidden]` (`[batch, seq/tp, hidden]` under
sequence parallelism), both riding along.
Out of the last layer: hidden states and the head's local weight, which `megalite.parallel.loss` turns into a loss
without ever holding all logits. Math follows transformers' models; ranks, files and optimizers are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel, gather_heads
from megalite.parallel.dropout import Dropout
from megalite.parallel.layers import LayerSpec, Payload, recomputed
from megalite.parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    lacks_fast_gemm,
    sharded_parameter,
)
from megalite.parallel.norm import LayerNorm, RMSNorm
from megalite.parallel.shard import Shard
from models.functional import causal_mask, document_mask, rotated_heads, swiglu

Recompute = Literal["none", "selective", "full"]
HeadOutput = tuple[Tensor, Tensor]  # hidden states, the head's local weight [vocab/tp, hidden]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


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
            build=partial(DecoderBlock, model, recompute, index == model.num_hidden_layers - 1),
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

    def __init__(self, model: ModelConfig, recompute: Recompute, is_last: bool, tp: TensorParallel) -> None:
        super().__init__()
        self.recompute, self.is_last = recompute, is_last
        self.input_layernorm = _norm(model, tp)
        self.self_attn = Attention(model, tp, recompute)
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


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; heads are cut over the ranks.

    Key/value features are cut evenly too. Where there are fewer key/value heads than ranks a rank computes a slice
    of a head, and the slices are gathered: activations are replicated, weights never are, so no replica can go stale
    and every parameter counts exactly once in the gradient norm.
    """

    def __init__(self, model: ModelConfig, tp: TensorParallel, recompute: Recompute) -> None:
        super().__init__()
        self.tp, self.recompute, self.head_dim = tp, recompute, model.head_dim
        self.rope_theta = model.rope_theta
        self.local_heads = model.num_attention_heads // tp.size
        self.kv_heads, self.kv_is_gathered = model.num_key_value_heads, model.num_key_value_heads < tp.size
        self.local_kv_heads = max(1, self.kv_heads // tp.size)
        q_size, kv_size = model.num_attention_heads * self.head_dim, self.kv_heads * self.head_dim
        sections = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = ColumnParallelLinear(model.hidden_size, sections, model.attention_bias, tp)
        self.o_proj = RowParallelLinear(q_size, model.hidden_size, model.attention_bias, tp)
        self.dropout = Dropout(model.attention_dropout, tp)

    def forward(self, hidden: Tensor, positions: Tensor | None, samples: Tensor | None) -> Tensor:
        """`[batch, seq(/tp), hidden]` -> the same."""
        qkv = self.qkv_proj(hidden)  # [batch, seq, (heads + 2 kv_heads) * head_dim / tp]
        if self.kv_is_gathered:
            qkv = self._whole_kv_head(qkv)
        if self.recompute == "selective" and torch.is_grad_enabled():
            # Korthikanti 2022, section 5: attention's insides are large and cheap to compute again
            context = recomputed(self._attend, qkv, positions, samples)
        else:
            context = self._attend(qkv, positions, samples)
        return self.o_proj(context)

    def _attend(self, qkv: Tensor, positions: Tensor | None, samples: Tensor | None) -> Tensor:
        batch, seq, _ = qkv.shape
        dtype = qkv.dtype
        if lacks_fast_gemm(qkv):
            qkv = qkv.float()
        heads = qkv.view(batch, seq, self.local_heads + 2 * self.local_kv_heads, self.head_dim)
        if positions is None:
            cos, sin = _fixed_rotation(seq, self.head_dim, self.rope_theta, qkv.device, qkv.dtype)
        else:
            cos, sin = _rotation(positions, self.head_dim, self.rope_theta, qkv.dtype)
        q, k, v = rotated_heads(heads, cos, sin, self.local_heads, self.local_kv_heads)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [batch, heads/tp, seq, head_dim]
        if self.dropout.is_active:
            context = self._attend_with_dropout(q, k, v, positions, samples)
        else:
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=None if positions is None else document_mask(positions),
                is_causal=positions is None,
                enable_gqa=self.local_heads != self.local_kv_heads,
            )
        return context.transpose(1, 2).flatten(2).to(dtype)  # [batch, seq, heads * head_dim / tp]

    def _attend_with_dropout(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None, samples: Tensor | None
    ) -> Tensor:
        """SDPA takes no mask of ours, so the probabilities exist: `[batch, heads/tp, seq, seq]`, several times."""
        k, v = (x.repeat_interleave(self.local_heads // self.local_kv_heads, dim=1) for x in (k, v))
        allowed = causal_mask(q.shape[2], q.device) if positions is None else document_mask(positions)
        scores = (q * self.head_dim**-0.5 @ k.transpose(2, 3)).masked_fill_(~allowed, float("-inf"))
        probabilities = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        return self.dropout.probabilities(probabilities, samples) @ (v * self.dropout.scale)

    def _whole_kv_head(self, qkv: Tensor) -> Tensor:
        """Slices of key/value heads -> the one whole head that this rank's queries attend to."""
        q, kv = qkv.split((self.local_heads * self.head_dim, qkv.shape[-1] - self.local_heads * self.head_dim), -1)
        # [batch, seq, 2, kv_heads * head_dim / tp] -> [batch, seq, 2, kv_heads * head_dim]
        kv = gather_heads(kv.unflatten(-1, (2, -1)), self.tp, dim=-1)
        mine = self.tp.rank * self.kv_heads // self.tp.size
        kv = kv[..., mine * self.head_dim : (mine + 1) * self.head_dim]
        return torch.cat((q, kv.flatten(2)), dim=-1)


def _rotation(positions: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin `[batch, seq, 1, head_dim/2]` in `dtype`, of angles in fp32."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions.to(torch.float32)[..., None, None] * (1.0 / theta**exponent)
    return angle.cos().to(dtype), angle.sin().to(dtype)


@lru_cache(maxsize=8)
def _fixed_rotation(
    seq: int, head_dim: int, theta: float, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`_rotation` of positions 0, 1, 2 ..., computed once for all layers and steps."""
    return _rotation(torch.arange(seq, device=device).unsqueeze(0), head_dim, theta, dtype)


class MLP(nn.Module):
    """Feed-forward part, gated (two fused projections) or plain; features are cut over the ranks."""

    def __init__(self, model: ModelConfig, tp: TensorParallel) -> None:
        super().__init__()
        size, bias = model.intermediate_size, model.mlp_bias
        self.is_gated, self.is_swiglu = model.gated_mlp, model.gated_mlp and model.hidden_act == "silu"
        self.activation = ACTIVATIONS[model.hidden_act]
        sections = {"gate_proj": size, "up_proj": size} if model.gated_mlp else {"up_proj": size}
        self.up_projections = ColumnParallelLinear(model.hidden_size, sections, bias, tp)
        self.down_proj = RowParallelLinear(size, model.hidden_size, bias, tp)

    def forward(self, hidden: Tensor) -> Tensor:
        """`[batch, seq(/tp), hidden]` -> the same."""
        features = self.up_projections(hidden)  # [batch, seq, (2) * intermediate / tp]
        if self.is_swiglu:
            return self.down_proj(swiglu(features))
        if self.is_gated:
            gate, up = features.chunk(2, dim=-1)
            return self.down_proj(self.activation(gate) * up)
        return self.down_proj(self.activation(features))
