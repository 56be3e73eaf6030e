"""Attention kernels of torch that take documents, windows and capped scores without a tensor of all scores.

Both need a GPU for training; `models.attention_inputs` chooses, and makes what they read. On a CPU the same results
come from a mask (`models.attention`).
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def attend_to_documents(
    q: Tensor, k: Tensor, v: Tensor, boundaries: Tensor, window: int | None, scale: float, *, is_grouped: bool
) -> Tensor:
    """Attends causally within documents, and within `window` tokens up to the query itself, by flash attention.

    q, k, v: `[batch, seq, heads, head_dim]`; boundaries as in `AttentionInputs`. Out: as q.
    """
    from torch.nn.attention.varlen import varlen_attn

    longest = q.shape[1]  # an upper bound, so that nobody has to ask the device
    left = -1 if window is None else window - 1  # tokens before the query; -1: all
    context = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        boundaries,
        boundaries,
        longest,
        longest,
        scale=scale,
        window_size=(left, 0),
        enable_gqa=is_grouped,
    )
    assert isinstance(context, Tensor)  # nothing else was asked for
    return context.unflatten(0, q.shape[:2])


def attend_capped(
    q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask | None, softcap: float, scale: float, *, is_grouped: bool
) -> Tensor:
    """Attends with scores `softcap * tanh(score / softcap)` (Gemma 2) where `block_mask` allows.

    q, k, v: `[batch, heads, seq, head_dim]`. Out: as q.
    """

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    attend = _flex_attention(compiled=not torch.compiler.is_compiling() and q.device.type != "cpu")
    context: Tensor = attend(q, k, v, capped, block_mask, scale, is_grouped)
    return context


@lru_cache(maxsize=2)
def _flex_attention(*, compiled: bool) -> Any:
    """Returns FlexAttention; outside of a compiled block it is compiled alone, because without it holds all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention) if compiled else flex_attention
