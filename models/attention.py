"""Causal self-attention of one block, its heads cut over the tensor-parallel ranks.

In and out: hidden states `[batch, seq/cp(/tp), hidden]`, with the micro-batch's `AttentionInputs`, and sample ids
`[batch]` where dropout is on. In generation a cache holds the keys and values of earlier tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.config import ModelConfig
from megalite.parallel.collectives import ContextParallel, TensorParallel, gather_heads
from megalite.parallel.context import gather_tokens, heads_of_tokens, tokens_of_heads
from megalite.parallel.dropout import Dropout
from megalite.parallel.fused_passes import HasPasses, joining
from megalite.parallel.layers import BlockInput, Recompute, recomputed
from megalite.parallel.linear import ColumnParallelLinear, Recomputable, RowParallelLinear, multipliable
from megalite.parallel.norm import NORMS, FullWidthRMSNorm
from models.attention_inputs import AttentionChoice, AttentionInputs, AttentionKind, Kernel, Seen, attention_inputs
from models.attention_kernels import (
    FLASH_DTYPES,
    FUSED_KERNELS,
    MOST_FLASH_HEAD_DIM,
    WITHOUT_CUDNN,
    attend_capped,
    attend_to_documents,
    why_not_flash,
    why_not_flex,
)
from models.key_value_cache import KeyValueCache
from models.rope import rope_of_layer

# Rotary embedding by Hugging Face's half-split convention, so that conversion renames weights and never permutes them.


class _Rotated(torch.autograd.Function):
    """Uses one buffer for all heads, and one for their gradients: concatenates nothing and does not keep the input."""

    @staticmethod
    def forward(
        ctx: Any, run: Any, sizes: tuple[int, ...], cos: Tensor, sin: Tensor, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.run, ctx.sizes, ctx.is_one = run, sizes, len(parts) == 1
        return run(_rotate, sizes, 1)(cos, sin, *parts).split(sizes, dim=2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = ctx.run(_rotate, ctx.sizes, -1)(*ctx.saved_tensors, *grads)  # the inverse rotation is the transpose
        return None, None, None, None, *((grad,) if ctx.is_one else grad.split(ctx.sizes, dim=2))


@joining
def _rotate(sizes: tuple[int, ...], sign: int, cos: Tensor, sin: Tensor, *parts: Tensor) -> Tensor:
    """Joins parts of heads, all or as `sizes`, in one pass; rotates those of q and k by `sign` times their angles."""
    if len(parts) == 1:
        parts = parts[0].split((sum(sizes[:2]), *sizes[2:]), dim=2)
    moved = len(parts) - len(sizes[2:])
    if torch.compiler.is_compiling():
        return torch.cat([*(_rotated_plainly(x, cos, sign * sin) for x in parts[:moved]), *parts[moved:]], dim=2)
    out = parts[0].new_empty((*parts[0].shape[:2], sum(sizes), parts[0].shape[3]))
    places = out.split([x.shape[2] for x in parts], dim=2)
    pairs = cos.shape[-1]
    for x, place in zip(parts[:moved], places, strict=False):
        first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
        torch.mul(first, cos, out=place[..., :pairs]).addcmul_(second, sin, value=-sign)
        torch.mul(second, cos, out=place[..., pairs : 2 * pairs]).addcmul_(first, sin, value=sign)
        if x.shape[-1] > 2 * pairs:
            place[..., 2 * pairs :] = x[..., 2 * pairs :]
    for x, place in zip(parts[moved:], places[moved:], strict=True):
        place.copy_(x)
    return out


def rotated(run: Any, sizes: tuple[int, ...], cos: Tensor, sin: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
    """Returns q and k with rotary embedding (Su 2021), and v if it is among `sizes`, the heads of each; from their
    parts `[batch, seq, heads, head_dim]`, or one of all. `run` as in `HasPasses`.

    cos and sin `[batch|1, seq, 1, pairs]`: the first `2 * pairs` features of a head are rotated.
    """
    if not torch.compiler.is_compiling():
        return _Rotated.apply(run, sizes, cos, sin, *parts)
    q, k, *values = parts if len(parts) > 1 else parts[0].split(sizes, dim=2)
    return _rotated_plainly(q, cos, sin), _rotated_plainly(k, cos, sin), *values


def _rotated_plainly(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates all heads of x for the compiler, which makes one kernel of it and its gradient, and takes no `out=`."""
    pairs = cos.shape[-1]
    first, second, others = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, others), dim=-1)


class Attention(HasPasses):
    """Causal grouped-query attention; heads are cut over the ranks.

    Key/value features are cut evenly too. Where there are fewer key/value heads than ranks a rank computes a slice
    of a head, and the slices are gathered: activations are replicated, weights never are, so no replica can go stale
    and every parameter counts exactly once in the gradient norm.

    While `cache` is set, the input tokens follow the cached ones and are added to them; there are no gradients.
    """

    def __init__(
        self, model: ModelConfig, layer: int, tp: TensorParallel, recompute: Recompute, choice: AttentionChoice = "auto"
    ) -> None:
        super().__init__()
        self.tp, self.recompute, self.head_dim, self.choice = tp, recompute, model.head_dim, choice
        self.rope = rope_of_layer(model, layer)
        self.window = model.sliding_window if model.has_window(layer) else None
        self.scale = (model.query_pre_attn_scalar or model.head_dim) ** -0.5
        self.softcap = model.attn_logit_softcapping
        self.local_heads = model.num_attention_heads // tp.size
        self.kv_heads, self.kv_is_gathered = model.num_key_value_heads, model.num_key_value_heads < tp.size
        self.local_kv_heads = max(1, self.kv_heads // tp.size)
        self.cache: KeyValueCache | None = None
        self.norms = model.query_key_norm
        self._add_projections(model)
        self.dropout = Dropout(model.attention_dropout, tp)

    def _add_projections(self, model: ModelConfig) -> None:
        q_size, kv_size, tp = model.num_attention_heads * self.head_dim, self.kv_heads * self.head_dim, self.tp
        sections = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = ColumnParallelLinear(model.hidden_size, sections, model.attention_bias, tp)
        self.o_proj = RowParallelLinear(q_size, model.hidden_size, model.attention_output_bias, tp)
        if self.norms == "per_head":
            self.q_norm, self.k_norm = norm_of_each_head(model, tp), norm_of_each_head(model, tp)
        elif self.norms == "full_width":
            self.q_norm = FullWidthRMSNorm(q_size, model.rms_norm_eps, tp)
            self.k_norm = FullWidthRMSNorm(kv_size, model.rms_norm_eps, tp)

    def shared_inputs(self, x: BlockInput) -> AttentionInputs:
        """Returns what this layer's attention reads beside hidden states, made once for all layers of its kind."""
        batch, seq, cp = x.hidden.shape[0], x.hidden.shape[1] * self.tp.sequence_parts, self.tp.context
        dtype, device = multipliable(x.hidden[:0]).dtype, x.hidden.device
        cached = 0 if self.cache is None else self.cache.length
        assert self.cache is None or x.positions is None, "a cache is for one document"
        window = self.window if self.window is not None and self.window < seq + cached else None
        is_masked = window is not None or x.positions is not None or (cp.size > 1 and cp.kind == "all_gather")
        kernel, _ = self.kernel(device, dtype, is_masked=is_masked)
        kind = AttentionKind(kernel, self.rope, window, dtype, cached)
        shared = {} if x.shared is None else x.shared
        if kind not in shared:
            shared[kind] = attention_inputs(kind, (batch, seq), device, x.positions, x.documents, cp)
        return cast(AttentionInputs, shared[kind])

    def kernel(self, device: torch.device, dtype: torch.dtype, *, is_masked: bool) -> tuple[Kernel, str | None]:
        """Returns what computes attention, and why nothing better does; None if this is the best."""
        if self.dropout.is_active:
            return "explicit", "probabilities are dropped (model.attention_dropout)"
        reason = None
        if self.cache is not None:
            reason = "tokens follow cached ones"
        elif self.choice != "auto":
            reason = f"performance.attention is {self.choice}"
        if self.softcap is not None:
            reason = reason or why_not_flex(device, self.head_dim)
            return ("explicit", reason) if reason else ("flex", None)
        if not is_masked:
            return "fused", None
        reason = reason or why_not_flash(device, dtype, self.head_dim)
        return ("fused", reason) if reason else ("varlen", None)

    def forward(self, hidden: Tensor | Recomputable, inputs: AttentionInputs, sample_ids: Tensor | None) -> Tensor:
        """`[batch, seq/cp(/tp), hidden]` -> the same."""
        projected = self._projected(hidden)
        # compiled, the compiler recomputes what is cheap: `megalite.engine.compilation`
        is_recomputed = self.recompute == "selective" and inputs.kernel == "explicit"
        if is_recomputed and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Korthikanti 2022, section 5: scores are large and cheap to recompute. Fused attention keeps none
            return self.o_proj(recomputed(self._attend, inputs, sample_ids, *projected))
        return self.o_proj(self._attend(inputs, sample_ids, *projected))

    def _projected(self, hidden: Tensor | Recomputable) -> tuple[Tensor, ...]:
        qkv = self.qkv_proj(hidden)  # [batch, seq/cp, (heads + 2 kv_heads) * head_dim / tp]
        if self.norms == "full_width":
            # [batch, seq, features/tp] each; a rank's k and v may be a slice of a head
            q_size = self.local_heads * self.head_dim
            kv_size = (qkv.shape[-1] - q_size) // 2
            q, k, v = qkv.split((q_size, kv_size, kv_size), dim=-1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=-1)
        return (self._whole_kv_head(qkv) if self.kv_is_gathered else qkv,)

    def _whole_kv_head(self, qkv: Tensor) -> Tensor:
        """Gathers slices of key/value heads into the one whole head that this rank's queries attend to."""
        q, kv = qkv.split((self.local_heads * self.head_dim, qkv.shape[-1] - self.local_heads * self.head_dim), -1)
        # [batch, seq, 2, kv_heads * head_dim / tp] -> [batch, seq, 2, kv_heads * head_dim]
        kv = gather_heads(kv.unflatten(-1, (2, -1)), self.tp, dim=-1)
        mine = self.tp.rank * self.kv_heads // self.tp.size
        kv = kv[..., mine * self.head_dim : (mine + 1) * self.head_dim]
        return torch.cat((q, kv.flatten(2)), dim=-1)

    def _attend(self, inputs: AttentionInputs, sample_ids: Tensor | None, *projected: Tensor) -> Tensor:
        q, k, v = self._heads(inputs, *projected)  # [batch, seq/cp, heads/tp, head_dim]
        attend = partial(self._attend_to, kernel=inputs.kernel, sample_ids=sample_ids)
        if self.tp.context.size > 1:
            context = _attend_beside_others(q, k, v, inputs.seen, self.tp.context, attend)
        else:
            context = attend(q, k, v, *inputs.seen)
        return context.flatten(2).to(projected[0].dtype)  # [batch, seq/cp, heads * head_dim / tp]

    def _attend_to(
        self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, kernel: Kernel, sample_ids: Tensor | None
    ) -> Tensor:
        """Attends from consecutive tokens: q `[batch, queries, heads, head_dim]`, k, v `[batch, keys, heads, head_dim]`
        -> as q."""
        is_grouped = q.shape[2] != k.shape[2]
        if kernel == "varlen":
            assert seen.boundaries is not None and seen.key_boundaries is not None
            boundaries = seen.boundaries, seen.key_boundaries
            return attend_to_documents(q, k, v, boundaries, self.window, self.scale, is_grouped=is_grouped)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, heads, tokens, head_dim]
        if self.cache is not None:
            assert not torch.is_grad_enabled(), "a cache is for inference, without gradients"
            # keys that the window of the first query still contains; 0: all
            reach = 0 if self.window is None else self.window + q.shape[2] - 1
            k, v = (x[:, :, -reach:].to(q.dtype) for x in self.cache.append(k, v))
        if kernel == "explicit":
            context = self._attend_explicitly(q, k, v, seen, sample_ids)
        elif kernel == "flex":
            assert self.softcap is not None
            context = attend_capped(q, k, v, seen.block_mask, self.softcap, self.scale, is_grouped=is_grouped)
        else:
            context = self._attend_fused(q, k, v, seen.mask)
        return context.transpose(1, 2)

    def _heads(self, inputs: AttentionInputs, *projected: Tensor) -> tuple[Tensor, ...]:
        """Returns q, k, v `[batch, seq/cp, heads/tp, head_dim]`, normalized and rotated."""
        sizes, cos, sin = (self.local_heads, self.local_kv_heads, self.local_kv_heads), inputs.cos, inputs.sin
        heads = projected[0].unflatten(-1, (sum(sizes), self.head_dim))
        if self.norms == "per_head":
            q, k, v = heads.split(sizes, dim=2)
            q, k, v = multipliable(self.q_norm(q)), multipliable(self.k_norm(k)), multipliable(v)
            if cos is None or sin is None:
                return q, k, v
            return *rotated(self.run, sizes[:2], cos, sin, q, k), v
        heads = multipliable(heads)
        if cos is None or sin is None:
            return heads.split(sizes, dim=2)
        return rotated(self.run, sizes, cos, sin, heads)

    def _attend_fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attends by torch's fused attention: `[batch, heads, queries, head_dim]` -> the same."""
        is_grouped, is_masked = q.shape[1] != k.shape[1], mask is not None
        if is_grouped and not self.takes_groups(q.device, q.dtype, is_masked=is_masked):
            k, v, is_grouped = _for_each_head(k, q), _for_each_head(v, q), False
        is_causal = mask is None and q.shape[2] > 1
        with sdpa_kernel(WITHOUT_CUDNN) if is_masked and q.device.type != "cpu" else nullcontext():
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=self.scale, enable_gqa=is_grouped
            )

    def takes_groups(self, device: torch.device, dtype: torch.dtype, *, is_masked: bool) -> bool:
        """Returns whether torch's fused attention takes fewer heads of keys and values than of queries: flash attention
        and cuDNN's do; torch would answer a GPU's other kernels with all scores in memory."""
        is_flash = not is_masked and dtype in FLASH_DTYPES and self.head_dim <= MOST_FLASH_HEAD_DIM
        return device.type == "cpu" or is_flash

    def fused_kernel(self, device: torch.device, dtype: torch.dtype, seq: int, *, is_masked: bool) -> str:
        """Asks torch for its kernel behind `fused` in training: device, versions and environment decide."""
        new = partial(torch.empty, dtype=dtype, device=device, requires_grad=True)
        q, k = new(1, self.local_heads, seq, self.head_dim), new(1, self.local_kv_heads, seq, self.head_dim)
        k = k if self.takes_groups(device, dtype, is_masked=is_masked) else q
        mask = torch.zeros(seq, seq, dtype=dtype, device=device) if is_masked else None
        with sdpa_kernel(WITHOUT_CUDNN) if is_masked else nullcontext():
            choice = torch._fused_sdp_choice(q, k, k, mask, 0.0, not is_masked, enable_gqa=q.shape != k.shape)
        return FUSED_KERNELS[SDPBackend(choice)]

    def _attend_explicitly(self, q: Tensor, k: Tensor, v: Tensor, seen: Seen, sample_ids: Tensor | None) -> Tensor:
        """Attends with our dropout or softcap, which SDPA does not take: holds `[batch, heads, queries, keys]` scores
        several times."""
        k, v, mask, place = _for_each_head(k, q), _for_each_head(v, q), seen.mask, seen.end - q.shape[2]
        if self.softcap is None:
            scores = q * self.scale @ k.transpose(2, 3)
        else:
            scores = (q * (self.scale / self.softcap) @ k.transpose(2, 3)).tanh_() * self.softcap
        if mask is not None:
            scores.masked_fill_(~mask, float("-inf"))
        probabilities = scores.softmax(dim=-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        if not self.dropout.is_active:
            return probabilities @ v
        exchanged = self.tp.context.rank * q.shape[1] if q.shape[1] < self.local_heads else 0
        head = self.tp.rank * self.local_heads + exchanged
        return self.dropout.probabilities(probabilities, sample_ids, head, place) @ (v * self.dropout.scale)


def _attend_beside_others(
    q: Tensor, k: Tensor, v: Tensor, seen: Sequence[Seen], cp: ContextParallel, attend: Callable[..., Tensor]
) -> Tensor:
    """Attends on a rank that shares sequences: `[batch, seq/cp, heads, head_dim]` -> the same."""
    if cp.kind == "ulysses":
        q, k, v = (tokens_of_heads(x, cp) for x in (q, k, v))
        return heads_of_tokens(attend(q, k, v, *seen), cp)
    k, v = gather_tokens(torch.cat((k, v), dim=2), cp).chunk(2, dim=2)
    parts = zip(q.chunk(len(seen), dim=1), seen, strict=True)
    return torch.cat([attend(own, k[:, : at.end], v[:, : at.end], at) for own, at in parts], dim=1)


def _for_each_head(x: Tensor, q: Tensor) -> Tensor:
    """Copies keys or values for each head of `q`: `[batch, kv_heads, ...]` -> `[batch, heads, ...]`."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def norm_of_each_head(model: ModelConfig, tp: TensorParallel) -> nn.Module:
    """Builds a norm over head_dim with a replicated weight.

    A rank sees only its own heads, as it sees only its own tokens of a cut sequence, so the weight's gradient is summed
    over the ranks in the same way.
    """
    cut = dataclasses.replace(tp, sequence_parallel=True)
    return NORMS[model.normalization](model.head_dim, model.rms_norm_eps, cut)
