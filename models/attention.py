"""Causal self-attention of one block, its heads cut over the tensor-parallel ranks.

In and out: hidden states `[batch, seq(/tp), hidden]`, with positions `[batch, seq]` where documents are masked and
sample ids `[batch]` where dropout is on. In generation a cache holds the keys and values of earlier tokens.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel, gather_heads
from megalite.parallel.dropout import Dropout
from megalite.parallel.layers import Recompute, recomputed
from megalite.parallel.linear import ColumnParallelLinear, Recomputable, RowParallelLinear, multipliable
from megalite.parallel.norm import NORMS, FullWidthRMSNorm
from models.rope import Rope, fixed_rotation, rope_of_layer, rotation


def document_mask(positions: Tensor, window: int | None = None) -> Tensor:
    """Returns the causal mask within documents, `[batch, 1, seq, seq]`; positions `[batch, seq]`, 0 at a start."""
    seq = positions.shape[1]
    document = (positions == 0).cumsum(dim=1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return (same & causal_mask(seq, seq, window, positions.device)).unsqueeze(1)


@lru_cache(maxsize=4)
@torch.inference_mode(False)  # training may reuse a mask that generation has cached
def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns `[queries, keys]` for the last `queries` of `keys` tokens, made once for all layers and steps."""
    newest = keys - queries
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(newest)
    return seen if window is None else seen.triu_(newest - window + 1)


@lru_cache(maxsize=2)  # keyed by the identity of the tensor
@torch.inference_mode(False)
def added_to_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts a `causal_mask` to 0 or -inf: from a bool mask torch's attention makes these anew in every layer, and
    each layer keeps its own for backward."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))


class KeyValueCache:
    """Keys and values of earlier tokens, for one attention layer of one rank; all sequences are equally long."""

    def __init__(
        self, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self._keys = torch.empty(batch, kv_heads, capacity, head_dim, dtype=dtype, device=device)
        self._values = torch.empty_like(self._keys)
        self.capacity = capacity
        self.length = 0  # tokens so far

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds keys and values `[batch, kv_heads, new, head_dim]` and returns those of all tokens so far.

        The results `[batch, kv_heads, length, head_dim]` are views that later calls do not change.
        """
        start, self.length = self.length, self.length + keys.shape[2]
        assert self.length <= self.capacity, f"{self.length} tokens in a cache for {self.capacity}"
        self._keys[:, :, start : self.length] = keys
        self._values[:, :, start : self.length] = values
        return self._keys[:, :, : self.length], self._values[:, :, : self.length]


# Rotary embedding by Hugging Face's half-split convention, so that conversion renames weights and never permutes them.


class _RotatedHeads(torch.autograd.Function):
    """Uses one buffer for q, k and v, and one for their gradients: concatenates nothing and does not keep the input."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.sizes = heads, kv_heads, kv_heads
        out = torch.empty_like(qkv)
        _rotate(qkv[:, :, :-kv_heads], cos, sin, out[:, :, :-kv_heads])
        q, k, v = out.split(ctx.sizes, dim=2)
        v.copy_(qkv[:, :, -kv_heads:])
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        cos, sin = ctx.saved_tensors
        first = grads[0]
        grad = first.new_empty((*first.shape[:2], sum(ctx.sizes), first.shape[-1]))
        q, k, v = grad.split(ctx.sizes, dim=2)
        _rotate(grads[0], cos, -sin, q)  # the inverse rotation is the transpose
        _rotate(grads[1], cos, -sin, k)
        v.copy_(grads[2])
        return grad, None, None, None, None


class _Rotated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, -sin, torch.empty_like(grad)), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Rotates the first features of each head in pairs (i, i + pairs) and copies the others to `out`."""
    pairs = cos.shape[-1]
    first, second, others = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    torch.mul(first, cos, out=out[..., :pairs]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., pairs : 2 * pairs]).addcmul_(first, sin)
    if others.shape[-1]:
        out[..., 2 * pairs :] = others
    return out


def rotated_heads(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k with rotary embedding (Su 2021), and v, from `[batch, seq, heads + 2 kv_heads, head_dim]`.

    cos and sin `[batch|1, seq, 1, pairs]`: the first `2 * pairs` features of a head are rotated.
    """
    return _RotatedHeads.apply(qkv, cos, sin, heads, kv_heads)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to `[batch, seq, heads, head_dim]`; cos and sin as in `rotated_heads`."""
    return _Rotated.apply(x, cos, sin)


Heads = tuple[Tensor, Tensor, Tensor]  # q, k, v


class Attention(nn.Module):
    """Causal grouped-query attention; heads are cut over the ranks.

    Key/value features are cut evenly too. Where there are fewer key/value heads than ranks a rank computes a slice
    of a head, and the slices are gathered: activations are replicated, weights never are, so no replica can go stale
    and every parameter counts exactly once in the gradient norm.

    While `cache` is set, the input tokens follow the cached ones and are added to them; there are no gradients.
    """

    def __init__(self, model: ModelConfig, layer: int, tp: TensorParallel, recompute: Recompute) -> None:
        super().__init__()
        self.tp, self.recompute, self.head_dim = tp, recompute, model.head_dim
        self.rope = rope_of_layer(model, layer)
        self.window = model.sliding_window if model.has_window(layer) else None
        self.scale = (model.query_pre_attn_scalar or model.head_dim) ** -0.5
        self.softcap = model.attn_logit_softcapping
        self.local_heads = model.num_attention_heads // tp.size
        self.kv_heads, self.kv_is_gathered = model.num_key_value_heads, model.num_key_value_heads < tp.size
        self.local_kv_heads = max(1, self.kv_heads // tp.size)
        self.cache: KeyValueCache | None = None
        q_size, kv_size = model.num_attention_heads * self.head_dim, self.kv_heads * self.head_dim
        sections = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = ColumnParallelLinear(model.hidden_size, sections, model.attention_bias, tp)
        self.o_proj = RowParallelLinear(q_size, model.hidden_size, model.attention_output_bias, tp)
        self.norms = model.query_key_norm
        if self.norms == "per_head":
            self.q_norm, self.k_norm = norm_of_each_head(model, tp), norm_of_each_head(model, tp)
        elif self.norms == "full_width":
            self.q_norm = FullWidthRMSNorm(q_size, model.rms_norm_eps, tp)
            self.k_norm = FullWidthRMSNorm(kv_size, model.rms_norm_eps, tp)
        self.dropout = Dropout(model.attention_dropout, tp)

    def forward(self, hidden: Tensor | Recomputable, positions: Tensor | None, sample_ids: Tensor | None) -> Tensor:
        """`[batch, seq(/tp), hidden]` -> the same."""
        qkv = self.qkv_proj(hidden)  # [batch, seq, (heads + 2 kv_heads) * head_dim / tp]
        if self.norms == "full_width":
            # [batch, seq, features/tp] each; a rank's k and v may be a slice of a head
            q_size = self.local_heads * self.head_dim
            kv_size = (qkv.shape[-1] - q_size) // 2
            q, k, v = qkv.split((q_size, kv_size, kv_size), dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        if self.kv_is_gathered:
            qkv = self._whole_kv_head(qkv)
        if self.recompute == "selective" and self.computes_scores and torch.is_grad_enabled():
            # Korthikanti 2022, section 5: scores are large and cheap to recompute. Fused attention keeps none
            context = recomputed(self._attend, qkv, positions, sample_ids)
        else:
            context = self._attend(qkv, positions, sample_ids)
        return self.o_proj(context)

    @property
    def computes_scores(self) -> bool:
        """True where fused attention does not do: all scores are in memory."""
        return self.dropout.is_active or self.softcap is not None

    def _whole_kv_head(self, qkv: Tensor) -> Tensor:
        """Gathers slices of key/value heads into the one whole head that this rank's queries attend to."""
        q, kv = qkv.split((self.local_heads * self.head_dim, qkv.shape[-1] - self.local_heads * self.head_dim), -1)
        # [batch, seq, 2, kv_heads * head_dim / tp] -> [batch, seq, 2, kv_heads * head_dim]
        kv = gather_heads(kv.unflatten(-1, (2, -1)), self.tp, dim=-1)
        mine = self.tp.rank * self.kv_heads // self.tp.size
        kv = kv[..., mine * self.head_dim : (mine + 1) * self.head_dim]
        return torch.cat((q, kv.flatten(2)), dim=-1)

    def _attend(self, qkv: Tensor, positions: Tensor | None, sample_ids: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in self._heads(qkv, positions))  # [batch, heads/tp, seq, head_dim]
        if self.cache is not None:
            assert positions is None and not torch.is_grad_enabled(), "a cache is for one document, without gradients"
            # keys that the window of the first query still contains; 0: all
            reach = 0 if self.window is None else self.window + q.shape[2] - 1
            k, v = (x[:, :, -reach:].to(q.dtype) for x in self.cache.append(k, v))
        mask = self._mask(q.shape[2], k.shape[2], positions, q.device)
        if self.computes_scores:
            context = self._attend_explicitly(q, k, v, mask, sample_ids)
        else:
            shared = mask is not None and positions is None
            context = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=added_to_scores(mask, q.dtype) if shared else mask,
                is_causal=mask is None and q.shape[2] > 1,
                scale=self.scale,
                enable_gqa=self.local_heads != self.local_kv_heads,
            )
        return context.transpose(1, 2).flatten(2).to(qkv.dtype)  # [batch, seq, heads * head_dim / tp]

    def _heads(self, qkv: Tensor, positions: Tensor | None) -> Heads:
        """Returns q, k, v `[batch, seq, heads/tp, head_dim]`, normalized and rotated."""
        sizes = self.local_heads, self.local_kv_heads, self.local_kv_heads
        heads = qkv.unflatten(-1, (sum(sizes), self.head_dim))
        if self.norms == "per_head":
            q, k, v = heads.split(sizes, dim=2)
            q, k, v = multipliable(self.q_norm(q)), multipliable(self.k_norm(k)), multipliable(v)
            if self.rope is None:
                return q, k, v
            cos, sin = self._rotation(q, self.rope, positions)
            return rotated(q, cos, sin), rotated(k, cos, sin), v
        heads = multipliable(heads)
        if self.rope is None:
            return heads.split(sizes, dim=2)
        return rotated_heads(heads, *self._rotation(heads, self.rope, positions), *sizes[:2])

    def _rotation(self, heads: Tensor, rope: Rope, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        if positions is not None:
            return rotation(positions, rope, heads.dtype)
        start = 0 if self.cache is None else self.cache.length
        return fixed_rotation(heads.shape[1], rope, heads.device, heads.dtype, start)

    def _mask(self, queries: int, keys: int, positions: Tensor | None, device: torch.device) -> Tensor | None:
        """Returns the mask of the last `queries` of `keys` tokens, `[(batch, 1,) queries, keys]`; None: causal."""
        window = self.window if self.window is not None and self.window < keys else None
        if positions is not None:
            return document_mask(positions, window)
        if queries == 1 or (queries == keys and window is None):
            return None
        return causal_mask(queries, keys, window, device)

    def _attend_explicitly(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sample_ids: Tensor | None
    ) -> Tensor:
        """Attends with our dropout or softcap, which SDPA does not take: holds `[batch, heads/tp, seq, seq]` scores
        several times."""
        k, v = (x.repeat_interleave(self.local_heads // self.local_kv_heads, dim=1) for x in (k, v))
        if self.softcap is None:
            scores = q * self.scale @ k.transpose(2, 3)
        else:
            scores = (q * (self.scale / self.softcap) @ k.transpose(2, 3)).tanh_() * self.softcap
        allowed = causal_mask(q.shape[2], k.shape[2], None, q.device) if mask is None else mask
        scores.masked_fill_(~allowed, float("-inf"))
        probabilities = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        if not self.dropout.is_active:
            return probabilities @ v
        return self.dropout.probabilities(probabilities, sample_ids) @ (v * self.dropout.scale)


def norm_of_each_head(model: ModelConfig, tp: TensorParallel) -> nn.Module:
    """Builds a norm over head_dim with a replicated weight.

    A rank sees only its own heads, as it sees only its own tokens of a cut sequence, so the weight's gradient is summed
    over the ranks in the same way.
    """
    cut = dataclasses.replace(tp, sequence_parallel=True)
    return NORMS[model.normalization](model.head_dim, model.rms_norm_eps, cut)
