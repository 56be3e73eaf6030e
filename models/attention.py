"""Causal self-attention of one block, its heads cut over the tensor-parallel ranks.

In and out: hidden states `[batch, seq(/tp), hidden]`; beside them positions `[batch, seq]` where documents are
masked, and sample numbers `[batch]` where dropout is on.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel, gather_heads
from megalite.parallel.dropout import Dropout
from megalite.parallel.layers import Recompute, recomputed
from megalite.parallel.linear import ColumnParallelLinear, RowParallelLinear, lacks_fast_gemm
from models.functional import causal_mask, document_mask, rotated_heads
from models.rope import fixed_rotation, rotation


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions; heads are cut over the ranks.

    Key/value features are cut evenly too. Where there are fewer key/value heads than ranks a rank computes a slice
    of a head, and the slices are gathered: activations are replicated, weights never are, so no replica can go stale
    and every parameter counts exactly once in the gradient norm.
    """

    def __init__(self, model: ModelConfig, layer: int, tp: TensorParallel, recompute: Recompute) -> None:
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
            cos, sin = fixed_rotation(seq, self.head_dim, self.rope_theta, qkv.device, qkv.dtype)
        else:
            cos, sin = rotation(positions, self.head_dim, self.rope_theta, qkv.dtype)
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
