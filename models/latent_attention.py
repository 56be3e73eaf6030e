"""Multi-head latent attention (DeepSeek-V2, section 2.1): keys and values of all heads come from a narrow latent.

In and out as `models.attention`. Per token there are latents of queries, if `model.q_lora_rank` is set, and of keys and
values, and one rotated part of a key that all heads share. Every tensor-parallel rank computes these; what makes heads
of them is cut over the ranks by heads. The math follows transformers' DeepseekV3Attention, which keeps the order of
the rotated features on disk: pairs are neighbours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.config import ModelConfig
from megalite.parallel.collectives import enter_parallel_region
from megalite.parallel.linear import ColumnParallelLinear, Recomputable, RowParallelLinear, multipliable
from megalite.parallel.norm import NORMS
from megalite.parallel.replicated_linear import ReplicatedLinear
from models.attention import Attention
from models.attention_inputs import AttentionInputs
from models.rope import score_factor

LATENT_NORM_EPS = 1e-6  # transformers' for these norms, whatever rms_norm_eps is


class LatentAttention(Attention):
    """Causal attention whose heads have values narrower than keys; kernels get them padded with zeros to one width."""

    def _add_projections(self, model: ModelConfig) -> None:
        tp, heads, hidden = self.tp, model.num_attention_heads, model.hidden_size
        nope, rotated, value = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
        assert model.kv_lora_rank is not None and nope is not None and rotated is not None and value is not None
        self.widths, self.value_dim = (nope, rotated), value
        assert self.rope is not None
        self.scale *= score_factor(self.rope)
        sizes = (model.q_lora_rank, model.kv_lora_rank, rotated)
        self.latents = tuple(size for size in sizes if size is not None)
        latents = {"kv_a_proj_with_mqa": model.kv_lora_rank + rotated}
        if model.q_lora_rank is None:
            self.a_proj = ReplicatedLinear(hidden, latents, model.attention_bias, tp)
            self.q_proj = ColumnParallelLinear(hidden, {"q_proj": heads * self.head_dim}, False, tp)
        else:
            latents = {"q_a_proj": model.q_lora_rank, **latents}
            self.a_proj = ReplicatedLinear(hidden, latents, model.attention_bias, tp)
            self.q_a_layernorm = NORMS[model.normalization](model.q_lora_rank, LATENT_NORM_EPS, tp)
            self.q_b_proj = ColumnParallelLinear(model.q_lora_rank, {"q_b_proj": heads * self.head_dim}, False, tp)
        self.kv_a_layernorm = NORMS[model.normalization](model.kv_lora_rank, LATENT_NORM_EPS, tp)
        self.kv_b_proj = ColumnParallelLinear(model.kv_lora_rank, {"kv_b_proj": heads * (nope + value)}, False, tp)
        self.o_proj = RowParallelLinear(heads * value, hidden, model.attention_output_bias, tp)

    def _projected(self, hidden: Tensor | Recomputable) -> tuple[Tensor, ...]:
        """Returns queries `[batch, seq/cp, heads/tp * head_dim]`, keys and values of heads `[batch, seq/cp, heads/tp *
        (nope + value)]`, and the part of keys to be rotated `[batch, seq/cp, rope]`."""
        *query, key_value, key = self.a_proj(hidden).split(self.latents, dim=-1)
        q = self.q_b_proj(self.q_a_layernorm(query[0])) if query else self.q_proj(hidden)
        # each rank has a part of the shared key's gradient, that of its heads
        return q, self.kv_b_proj(self.kv_a_layernorm(key_value)), enter_parallel_region(key, self.tp)

    def _heads(self, inputs: AttentionInputs, *projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k, v `[batch, seq/cp, heads/tp, head_dim]`, rotated and padded."""
        q, key_value, key = (multipliable(x) for x in projected)
        q, q_rotated = q.unflatten(-1, (self.local_heads, -1)).split(self.widths, dim=-1)
        k, v = key_value.unflatten(-1, (self.local_heads, -1)).split((self.widths[0], self.value_dim), dim=-1)
        k_rotated = _rotated_neighbours(key.unsqueeze(2), inputs).expand(*k.shape[:3], -1)
        q = torch.cat((q, _rotated_neighbours(q_rotated, inputs)), dim=-1)
        return q, torch.cat((k, k_rotated), dim=-1), F.pad(v, (0, self.head_dim - self.value_dim))

    def _attend(self, inputs: AttentionInputs, sample_ids: Tensor | None, *projected: Tensor) -> Tensor:
        context = super()._attend(inputs, sample_ids, *projected)
        return context.unflatten(-1, (self.local_heads, -1))[..., : self.value_dim].flatten(2)


def _rotated_neighbours(x: Tensor, inputs: AttentionInputs) -> Tensor:
    """Rotates pairs (2i, 2i + 1) of `[batch, seq/cp, heads, rope]`; the first of all pairs come out before the second
    ones, which scores do not see."""
    cos, sin = inputs.cos, inputs.sin
    assert cos is not None and sin is not None
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
