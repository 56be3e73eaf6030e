"""Attention kernels of torch that take documents, windows and capped scores without a tensor of all scores.

Both need a GPU for training: `why_not_flash` and `why_not_flex` say what keeps a layer from them, `models.attention`
chooses, and `models.attention_inputs` makes what they read. On a CPU the same results come from a mask.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

FLASH_DTYPES = (torch.bfloat16, torch.float16)
MOST_FLASH_HEAD_DIM = 256
# bytes of a multiprocessor's memory: torch's smallest kernel for heads of 256 takes 148 KiB; an A100 has 163, an L4 99
SHARED_BY_WIDE_HEADS = 160 << 10
# cuDNN plans for some 30 ms of the host's time for every number of keys, and with a mask its gradients can be NaN
# (pytorch#196678)
WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
FUSED_KERNELS = dict(zip(WITHOUT_CUDNN, ("flash", "memory-efficient", "unfused"), strict=True))
FUSED_KERNELS[SDPBackend.CUDNN_ATTENTION] = "cuDNN"


def attend_to_documents(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    boundaries: tuple[Tensor, Tensor],
    window: int | None,
    scale: float,
    *,
    is_grouped: bool,
) -> Tensor:
    """Attends causally within documents, and within `window` tokens up to the query itself, by flash attention.

    q `[batch, queries, heads, head_dim]`, k, v `[batch, keys, heads, head_dim]`; boundaries: those of queries and keys,
    as in `Seen`; of a document the last keys are those of its queries. Out: as q.
    """
    from torch.nn.attention.varlen import varlen_attn  # which imports torch's compiler

    longest = q.shape[1], k.shape[1]  # upper bounds, so that nobody has to ask the device
    left = -1 if window is None else window - 1  # tokens before the query; -1: all
    query, key, value = (x.flatten(0, 1) for x in (q, k, v))
    options: dict[str, Any] = {"scale": scale, "window_size": (left, 0)}
    if "enable_gqa" in (varlen_attn.__kwdefaults__ or ()):  # torch 2.11 takes grouped heads as they are
        options["enable_gqa"] = is_grouped
    context = varlen_attn(query, key, value, *boundaries, *longest, **options)
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


def why_not_flash(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Returns why documents and windows are masks over all scores; None if flash attention takes their boundaries."""
    if device.type != "cuda":
        return "flash attention needs a GPU"
    if dtype not in FLASH_DTYPES:
        return f"flash attention takes bf16 and fp16, not {dtype}"
    if head_dim > MOST_FLASH_HEAD_DIM or head_dim % 8:
        return f"flash attention takes heads of at most {MOST_FLASH_HEAD_DIM} features, a multiple of 8"
    return None


def why_not_flex(device: torch.device, head_dim: int) -> str | None:
    """Returns why capped scores exist in memory; None if FlexAttention caps them in its kernel."""
    if device.type != "cuda":  # on a CPU it has no gradient
        return "FlexAttention's gradient needs a GPU"
    if head_dim < 16 or head_dim & (head_dim - 1):
        return "FlexAttention takes heads of 16, 32, 64 ... features"
    if head_dim > 128:
        # without the property: ROCm, for whose memory torch has kernels of its own
        found = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", SHARED_BY_WIDE_HEADS)
        if found < SHARED_BY_WIDE_HEADS:
            needed = f"{SHARED_BY_WIDE_HEADS >> 10} KiB of shared memory for heads of {head_dim} features"
            return f"FlexAttention needs {needed}, and this GPU has {found >> 10}"
    return None
